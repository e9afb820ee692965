"""What a task is like, found in one process before anything is compared: does it draw, is its data the same again,
and is the loss of a batch the mean of its halves' losses?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]
from torch.nn.modules.dropout import _DropoutNd  # pyright: ignore[reportPrivateUsage]

from unipar.backend.precision import batch_dtype
from unipar.config import Config
from unipar.config.settled import SettledConfig
from unipar.data.dataset import data_source_of
from unipar.data.feed import MicrobatchFeed
from unipar.distributed.world import World
from unipar.engines.batch import to_device
from unipar.engines.forward import ForwardCall, OpaqueBatch
from unipar.model.create import create_parts
from unipar.task import Task
from unipar.training.fingerprint import fingerprint_batch
from unipar.utils.seeding import seed_all

EQUAL_LOSS_TOLERANCE = 1e-9
"""How near two losses in fp64 are that should be equal."""


def disable_dropout(task: Task) -> list[str]:
    """From now on the task's model has no dropout; the names of what had some appear in the list once it is made."""
    names: list[str] = []
    original: Any = task.model

    def model() -> Any:
        made = original()
        names.clear()
        for part in made.values() if isinstance(made, dict) else [made]:
            if isinstance(part, nn.Module):
                names.extend(_zero_dropout(part))
        return made

    vars(task)["model"] = model
    return names


def _zero_dropout(module: nn.Module) -> Iterator[str]:
    for name, inner in module.named_modules():
        if not inner.training:
            continue
        if isinstance(inner, _DropoutNd):
            if inner.p:
                inner.p = 0.0
                yield name
            continue
        for key, value in list(vars(inner).items()):
            if "drop" in key and isinstance(value, float) and 0.0 < value <= 1.0:
                setattr(inner, key, 0.0)
                yield f"{name}.{key}" if name else key


def probe_task(task: Task, settled: SettledConfig, world: World) -> dict[str, Any]:
    """The config says fp64, so that what differs is not rounding."""
    config, sizes = settled.config, settled.sizes
    collate = task.collate if task.defines("collate") else None
    source = data_source_of(task.data(), collate, task.collate, config, sizes)
    feed = MicrobatchFeed(source, sizes, 0, config.train.seed)
    keys = next(feed.plans(0))[0].keys
    again = fingerprint_batch(feed.read(keys)) == fingerprint_batch(feed.read(keys))
    modules = create_parts(task.model, config, world)
    module = next(iter(modules.values())).to(world.device)
    asked = _TaskLoss(task, module, config, world)
    batch = feed.read(keys)
    found: dict[str, Any] = {
        "readable": bool(fingerprint_batch(batch)),
        "again": again,
        "draws": False,
        "parts": list(modules),
        "norms": [n for n, m in module.named_modules() if _uses_batch_statistics(m)],
        "apart": None,
        "optimizer": optimizer_uses_whole_tensors(task) if task.defines("optimizer") else None,
    }
    if len(modules) > 1:  # their losses are in the task's own loop
        return found
    first, drawn = asked(batch, 0), asked(batch, 1)
    found["draws"] = not _near(first, drawn)
    if len(keys) > 1 and not found["draws"]:
        half = len(keys) // 2
        parts = [feed.read(keys[:half]), feed.read(keys[half:])]
        weights = [_weight(task, part, n) for part, n in zip(parts, (half, len(keys) - half), strict=True)]
        if sum(weights) > 0:
            mean = sum(asked(p, 0) * w for p, w in zip(parts, weights, strict=True) if w) / sum(weights)
            found["apart"] = not _near(first, mean)
            found["batch_loss"], found["halves_loss"] = first, mean
    return found


def optimizer_uses_whole_tensors(task: Task) -> bool:
    """Whether a step of the task's own optimizer on a tensor is another than on flat halves of it."""
    made = torch.Generator().manual_seed(0)
    weight, *grads = (torch.randn(8, 4, generator=made, dtype=torch.float64) for _ in range(3))

    def stepped(cut: Callable[[Tensor], Sequence[Tensor]]) -> Tensor:
        parts = [nn.Parameter(part.clone()) for part in cut(weight)]
        optimizer: Any = task.optimizer([{"params": parts, "lr": 0.1, "weight_decay": 0.1}])
        for grad in grads:
            for part, mine in zip(parts, cut(grad), strict=True):
                part.grad = mine.clone()
            optimizer.step()
        return torch.cat([part.detach().flatten() for part in parts])

    whole = stepped(lambda t: [t])
    try:
        return not torch.allclose(whole, stepped(lambda t: t.flatten().chunk(2)), rtol=EQUAL_LOSS_TOLERANCE, atol=0.0)
    except (RuntimeError, ValueError, IndexError, AssertionError):
        return True  # it takes matrices only


class _TaskLoss:
    """The task's loss on a model that stays as it is."""

    def __init__(self, task: Task, module: nn.Module, config: Config, world: World) -> None:
        self._task, self._module, self._world = task, module, world
        self._cast = batch_dtype(config.train.precision)

    def __call__(self, batch: Any, seed: int) -> float:
        call = ForwardCall(self._module, self._world.device, cast=self._cast)
        before = [(b, b.clone()) for b in self._module.buffers()]
        seed_all(seed)
        with torch.no_grad():
            loss: Tensor = call(self._task.loss, OpaqueBatch(to_device(batch, self._world.device)))
            for buffer, was in before:
                buffer.copy_(was)
        return float(loss)


def _uses_batch_statistics(module: nn.Module) -> bool:
    """Whether it takes the mean over the samples that this rank sees."""
    return isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm) and module.training


def _weight(task: Task, batch: Any, samples: int) -> float:
    weight = task.weight(batch)
    return float(samples if weight is None else weight)


def _near(a: float, b: float) -> bool:
    return abs(a - b) <= EQUAL_LOSS_TOLERANCE * max(1.0, abs(a))
