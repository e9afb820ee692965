"""Probe of a task in one process, before anything is compared: does its loss draw random numbers, is its data the same
when read again, and are loss and gradient of a batch the means of its halves'?"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]
from torch.nn.modules.dropout import _DropoutNd  # pyright: ignore[reportPrivateUsage]

from unipar.backend.precision import batch_dtype
from unipar.config import Config, Precision
from unipar.config.settled import SettledConfig
from unipar.data.dataset import data_source_of
from unipar.data.lengths import measure_lengths
from unipar.data.microbatch_loader import MicrobatchLoader
from unipar.data.order import SampleKey
from unipar.distributed.world import World
from unipar.engines.batch_transfer import to_device
from unipar.engines.fingerprint import fingerprint_batch
from unipar.engines.forward import ForwardCall, OpaqueBatch
from unipar.errors import UniparError
from unipar.model.create import ONLY_PART, combine_parts, create_parts
from unipar.model.modes import enter_training_mode
from unipar.optimizers.matrix_optimizer import MatrixOptimizer
from unipar.task import Task
from unipar.utils.seeding import seed_all

EQUAL_LOSS_TOLERANCE: dict[Precision, float] = {"fp64": 1e-9, "fp32": 64 * 2.0**-23}
"""Relative tolerance of two losses that should be equal, by precision; in fp32 their sums are added in other orders."""

COARSE_LOSS_TOLERANCE = 16 * 2.0**-23
"""The same for a model in fp64 that computes its loss in a coarser dtype, as models of transformers do."""

ORDER_ALLOWANCE = 16
"""Difference of two gradients that should be equal, as a multiple of what the reversed order of the samples changes."""

LONGEST_ERROR = 200
"""Characters of the text of an error that are shown."""


def disable_dropout(task: Task) -> list[str]:
    """Set dropout to 0 in models that the task creates; return a list that then holds the names of what was changed."""
    names: list[str] = []
    original: Any = task.model

    def model() -> Any:
        created = original()
        names.clear()
        for part in created.values() if isinstance(created, dict) else [created]:
            if isinstance(part, nn.Module):
                enter_training_mode(part, keep=task.keep_modes)
                names.extend(_zero_dropout(part))
        return created

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


def error_in_one_line(error: BaseException) -> str:
    """Return the class of an error and the first line of its text."""
    text = next(iter(str(error).splitlines()), "")
    short = text if len(text) <= LONGEST_ERROR else f"{text[:LONGEST_ERROR]}..."
    return f"{type(error).__name__}: {short}" if short else type(error).__name__


def probe_task(task: Task, settled: SettledConfig, world: World) -> dict[str, Any]:
    """Return facts about the task; the config's precision is fp64, so that differences are not due to rounding."""
    config, sizes = settled.config, settled.sizes
    collate = task.collate if task.defines("collate") else None
    source = data_source_of(task.data(), collate, task.collate, config, sizes)
    lengths = measure_lengths(task, source.dataset, config.train.seed, sizes)
    loader = MicrobatchLoader(source, sizes, 0, config.train.seed, lengths=lengths)
    keys = next(loader.plans(0))[0].keys
    batch = loader.read(keys)
    modules = create_parts(task.model, config, world)
    modes = enter_training_mode(combine_parts(modules), keep=task.keep_modes)
    norms = [n for n, m in next(iter(modules.values())).named_modules() if _uses_batch_statistics(m)]
    facts: dict[str, Any] = {
        "readable": bool(fingerprint_batch(batch)),
        "again": fingerprint_batch(batch) == fingerprint_batch(loader.read(keys)),
        "draws": False,
        "parts": list(modules),
        "norms": norms,
        "trained_in_eval": list(modes.trained),
        "apart": None,
        "optimizer": optimizer_uses_whole_tensors(task) if task.defines("optimizer") else None,
    }
    if len(modules) > 1:  # the losses of parts are computed in the task's own loop
        return facts
    compare = _find_draws if task.defines("loss_across") else _compare_losses  # of the whole batch by declaration
    try:
        return facts | compare(_TaskLoss(task, modules[ONLY_PART], config, world), loader, keys)
    except UniparError:
        raise
    except Exception:  # whether fp64 is the reason is decided by trying: an error in fp32 too is the task's own
        config = config.changed({"train.precision": "fp32"})
        module = create_parts(task.model, config, world)[ONLY_PART]
        enter_training_mode(module, keep=task.keep_modes)
        return facts | compare(_TaskLoss(task, module, config, world), loader, keys)


def _find_draws(loss_of: _TaskLoss, loader: MicrobatchLoader, keys: list[SampleKey]) -> dict[str, Any]:
    """Return whether the loss draws random numbers."""
    batch = loader.read(keys)
    return {"draws": not loss_of.equal(loss_of(batch, 0), loss_of(batch, 1))}


def _compare_losses(loss_of: _TaskLoss, loader: MicrobatchLoader, keys: list[SampleKey]) -> dict[str, Any]:
    """Return whether the loss draws random numbers, and whether loss and gradient of a batch are its halves' means."""
    batch = loader.read(keys)
    first, drawn = loss_of(batch, 0), loss_of(batch, 1)
    if not loss_of.equal(first, drawn):
        return {"draws": True}
    half = len(keys) // 2
    cut = [keys[:half], keys[half:]] if half else []
    parts = [loader.read(mine) for mine in cut]
    weights = [loss_of.weight(part, loader.units(mine)) for part, mine in zip(parts, cut, strict=True)]
    if not sum(weights) > 0:
        return {}
    losses = [loss_of(part, 0) if weight else 0.0 for part, weight in zip(parts, weights, strict=True)]
    mean = sum(loss * weight for loss, weight in zip(losses, weights, strict=True)) / sum(weights)
    differs = not loss_of.equal(first, mean)
    shares = [weight / sum(weights) for weight in weights]
    off = (
        {}
        if differs
        else _compare_gradients(loss_of, batch, loader.read(keys[::-1]), list(zip(parts, shares, strict=True)))
    )
    return {
        "apart": differs or bool(off),
        "sum": differs and loss_of.equal(first, sum(losses)),
        "batch_loss": first,
        "halves_loss": mean,
        **off,
    }


def _compare_gradients(
    loss_of: _TaskLoss, batch: Any, other_order: Any, parts: list[tuple[Any, float]]
) -> dict[str, Any]:
    """Return the parameter whose gradient differs most from the mean of the parts' gradients; {} if all are equal.

    A term of small weight, as a balancing of experts is, is lost in the rounding of the loss. In the gradient of the
    few parameters that it trains it is a large part.
    """
    full, reversed_ = loss_of.gradients(batch), loss_of.gradients(other_order)
    mean = {name: torch.zeros_like(gradient) for name, gradient in full.items()}
    for part, share in parts:
        for name, gradient in loss_of.gradients(part).items() if share else ():
            mean[name] += share * gradient
    norms = {name: float(gradient.norm()) for name, gradient in full.items()}
    total = math.hypot(*norms.values())
    tolerance = min(loss_of.tolerance, COARSE_LOSS_TOLERANCE)
    worst, most = "", 1.0
    for name, gradient in full.items():
        rounding = ORDER_ALLOWANCE * float((reversed_[name] - gradient).norm())
        allowed = rounding + tolerance * (norms[name] + total / 16)  # a gradient near zero is rounded as large ones are
        if (off := float((mean[name] - gradient).norm())) > most * allowed:
            worst, most = name, off / allowed
    if not worst:
        return {}
    return {"gradient": worst, "gradient_off": float((mean[worst] - full[worst]).norm()) / (norms[worst] or total)}


def optimizer_uses_whole_tensors(task: Task) -> bool:
    """Return whether a step of the task's optimizer on a tensor differs from a step on flat halves of the tensor."""
    generator = torch.Generator().manual_seed(0)
    weight, *grads = (torch.randn(8, 4, generator=generator, dtype=torch.float64) for _ in range(3))

    def stepped(cut: Callable[[Tensor], Sequence[Tensor]]) -> Tensor:
        parts = [nn.Parameter(part.clone()) for part in cut(weight)]
        optimizer: Any = task.optimizer([{"params": parts, "lr": 0.1, "weight_decay": 0.1}])
        if isinstance(optimizer, MatrixOptimizer):
            optimizer.separate([])  # matrices are joined for it: the rest, which are AdamW's, is what is tried
        for grad in grads:
            for part, mine in zip(parts, cut(grad), strict=True):
                part.grad = mine.clone()
            optimizer.step()
        return torch.cat([part.detach().flatten() for part in parts])

    full = stepped(lambda t: [t])
    try:
        return not torch.allclose(full, stepped(lambda t: t.flatten().chunk(2)), rtol=1e-9, atol=0.0)
    except (RuntimeError, ValueError, IndexError, AssertionError):
        return True  # the optimizer takes matrices only


class _TaskLoss:
    """Function from a batch to the task's loss, which leaves the model unchanged."""

    def __init__(self, task: Task, module: nn.Module, config: Config, world: World) -> None:
        self._task, self._module, self._world = task, module.to(world.device), world
        self._cast = batch_dtype(config.train.precision)
        self.tolerance = EQUAL_LOSS_TOLERANCE[config.train.precision]

    def __call__(self, batch: Any, seed: int) -> float:
        with torch.no_grad(), self._evaluated(batch, seed) as loss:
            return float(loss)

    def gradients(self, batch: Any) -> dict[str, Tensor]:
        """Return the gradient of a batch's loss with respect to each parameter, in fp64 on the CPU."""
        with self._evaluated(batch, 0) as loss:
            if loss.requires_grad:
                loss.backward()
        gradients = {
            name: (torch.zeros_like(p) if p.grad is None else p.grad.to_dense()).to("cpu", torch.float64)
            for name, p in self._module.named_parameters()
            if p.requires_grad
        }
        self._module.zero_grad()
        return gradients

    @contextmanager
    def _evaluated(self, batch: Any, seed: int) -> Generator[Tensor]:
        """Context manager: the loss of a batch; buffers that changed are reset at the end."""
        call = ForwardCall(self._module, self._world.device, cast=self._cast)
        before = [(b, b.clone()) for b in self._module.buffers()]
        seed_all(seed)
        loss: Tensor = call(self._task.loss, OpaqueBatch(to_device(batch, self._world.device)))
        if loss.dtype != torch.float64:
            self.tolerance = max(self.tolerance, COARSE_LOSS_TOLERANCE)
        yield loss
        with torch.no_grad():
            for buffer, was in before:
                buffer.copy_(was)

    def equal(self, one: float, other: float) -> bool:
        """Return whether two losses are equal up to rounding."""
        return abs(one - other) <= self.tolerance * max(1.0, abs(one))

    def weight(self, batch: Any, units: int) -> float:
        """Return the weight of a batch of this many samples, or tokens."""
        weight = self._task.weight(batch)
        return float(units if weight is None else weight)


def _uses_batch_statistics(module: nn.Module) -> bool:
    """Return whether a module normalises by the mean over this rank's samples."""
    return isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm) and module.training
