"""One process, written out by hand: the loop that every strategy must equal."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

import unipar
from tests.conformance import chain, gan
from tests.conformance.apart import Apart
from tests.conformance.bf16_moments import Bf16ByHand
from tests.conformance.cases import FILE, Case, dtype_of
from tests.conformance.contrastive import Pairs
from tests.conformance.eight_bits import eight_bits_by_hand
from tests.conformance.generation import Generating
from tests.conformance.lengths import fill_batches
from tests.conformance.matrix_task import MuonByHand, matrices_of
from tests.conformance.scores import Scored
from unipar.config import Config, Strategy
from unipar.data.dataset import SeededDataset
from unipar.data.order import SampleOrder, shuffled_indices, split_batch
from unipar.utils.seeding import mix_seed, seed_all

ONE = Strategy("native")


@dataclass
class Result:
    losses: list[float] = field(default_factory=list[float])
    norms: list[float] = field(default_factory=list[float])
    params: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    evals: list[Any] = field(default_factory=list[Any])
    parts: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    """Of each of several parts, the losses of its steps."""

    averages: dict[str, Tensor] = field(default_factory=dict[str, Tensor])


def train_by_hand(case: Case, size: int) -> Result:
    """The whole global batch in one forward; or, where a case asks, microbatch by microbatch."""
    torch.set_num_threads(1)
    if case.through:
        return chain.train_chain_by_hand(case, Result(), size)
    if case.several:
        return gan.train_gan_by_hand(case, Result(), size)
    config = case.config(ONE, size)
    task: Any = case.task()
    seed_all(config.train.seed)
    model = task.model()
    if not model.training:
        model.train()
    if config.model.loading is not None:
        held = load_file(FILE)
        model.load_state_dict({n.removeprefix("module."): t for n, t in held.items()}, strict=False)
    for tensor in (*model.parameters(), *model.buffers()):
        if (
            tensor.is_floating_point() and tensor.dtype is not torch.bfloat16
        ):  # .to() would take the imaginary part of complex ones
            tensor.data = tensor.data.to(dtype_of(case))
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = _groups(config, task, model, trained)
    optimizer = _own(config, task, model, groups) if task.defines("optimizer") else optimizer_of(config, model, groups)
    base = [g["lr"] for g in optimizer.param_groups]
    data = task.data()
    dataset: Any = data.dataset if isinstance(data, DataLoader) else data
    if streamed := isinstance(dataset, IterableDataset):
        dataset = list(dataset)
    collate = task.collate
    seen = SeededDataset(dataset, config.train.seed)
    sizes = config.batch.settle(size)
    if sizes.tokens is None:
        order = SampleOrder(
            len(dataset), sizes.total, config.train.seed, shuffle=not streamed, last_batch=config.data.last_batch
        )
        batches, steps = order.batches(0), config.train.steps or (config.train.epochs or 0) * order.per_epoch
    else:
        batches = fill_batches(lambda i: task.length(dataset[i]), _order_of(data, config.train.seed), sizes.total)
        steps = config.train.steps or 0
    result = Result()
    averages = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    for step, (epoch, indices) in zip(range(steps), batches, strict=False):
        parts = [indices]
        if case.micro:
            parts = [mine or indices[:1] for micro in split_batch(indices, sizes.accumulate, size) for mine in micro]
        read = [collate([seen[epoch, i] for i in part]) for part in parts]
        weights = [
            float(len(part) if (w := task.weight(b)) is None else w) for part, b in zip(parts, read, strict=True)
        ]
        total = 0.0
        losses = task.losses() if isinstance(task, Apart) else [] if isinstance(task, Pairs) else [task.loss]
        for (k, fn), (i, (batch, weight)) in product(enumerate(losses), enumerate(zip(read, weights, strict=True))):
            seed_all(mix_seed(config.train.seed, 3, step, i, *([k] if k else [])))
            loss = fn(model, _cast(batch, dtype_of(case))) * (weight / sum(weights))
            loss.backward()
            total += loss.item()
        if isinstance(task, Pairs):
            loss = task.by_hand(model, read, partial(_seed, config.train.seed, step))
            loss.backward()
            total = loss.item()
        for p in trained:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        clip = config.train.clipping
        norm = torch.nn.utils.clip_grad_norm_(trained, clip.max if clip else math.inf)
        assert clip is None or norm > clip.max, "the clip does not bite"
        for group, lr in zip(optimizer.param_groups, base, strict=True):
            group["lr"] = lr * (task.schedule if task.defines("schedule") else partial(factor_of, config))(step, steps)
        optimizer.step()
        optimizer.zero_grad()
        result.losses.append(total)
        result.norms.append(float(norm))
        if config.train.ema is not None and (step + 1) % config.train.ema.every == 0:
            k = (step + 1) // config.train.ema.every
            decay = min(config.train.ema.decay, k / (k + config.train.ema.warmup))
            averages = {n: decay * a + (1 - decay) * model.get_parameter(n).detach() for n, a in averages.items()}
        if config.eval.every and (step + 1) % config.eval.every == 0:
            kept = {n: model.get_parameter(n).detach().clone() for n in averages}
            _set_weights(model, averages if config.train.ema is not None else kept)
            result.evals.append(_evaluated(task, model))
            _set_weights(model, kept)
    result.averages = {n: a.flatten() for n, a in averages.items()} if config.train.ema is not None else {}
    if isinstance(task, Generating):
        model.eval()
        result.evals.append(task.generated(model))
    result.params = {n: p.detach().flatten() for n, p in model.named_parameters()}
    return result


def _seed(*numbers: int) -> None:
    seed, step, micro = numbers
    seed_all(mix_seed(seed, 3, step, micro))


def _leave_seed(micro: int) -> None:
    """Nothing is drawn in an evaluation."""


def _order_of(data: Any, seed: int) -> Callable[[int], list[int]]:
    """The order of each epoch, asked for one after another: that of the loader's sampler, or shuffled."""
    if isinstance(data, DataLoader):
        sampler: Any = data.sampler
        return lambda epoch: list(sampler)
    return lambda epoch: shuffled_indices(len(data), seed, epoch, shuffle=True)


def _set_weights(model: Any, values: dict[str, Tensor]) -> None:
    for name, value in values.items():
        model.get_parameter(name).data.copy_(value)


def _groups(config: Config, task: Any, model: Any, trained: list[Any]) -> Any:
    groups = task.groups(model)
    if groups is None and config.train.optimizer.decay == "matrices":
        thick, thin = [p for p in trained if p.ndim > 1], [p for p in trained if p.ndim < 2]
        return [{"params": thick}, {"params": thin, "weight_decay": 0.0}]
    return groups


def _own(config: Config, task: Any, model: Any, groups: Any) -> torch.optim.Optimizer:
    told = {"lr": config.train.optimizer.lr, "weight_decay": config.train.optimizer.weight_decay}
    optimizer = task.optimizer([told | group for group in groups])
    if isinstance(optimizer, unipar.MatrixOptimizer):
        optimizer.separate(matrices_of(model))
    return optimizer


def optimizer_of(config: Config, model: Any, groups: Any = None) -> torch.optim.Optimizer:
    wanted: Any = config.train.optimizer
    if wanted.name == "muon":
        return MuonByHand(config, model, groups)
    groups = groups or [p for p in model.parameters() if p.requires_grad]
    if wanted.name == "adamw-bf16":
        return Bf16ByHand(model, groups, lr=wanted.lr, weight_decay=wanted.weight_decay, eps=wanted.eps)
    if wanted.name == "adamw-8bit":
        return eight_bits_by_hand(
            groups, block_size=wanted.block, lr=wanted.lr, weight_decay=wanted.weight_decay, eps=wanted.eps
        )
    if wanted.name == "sgd":
        return torch.optim.SGD(groups, lr=wanted.lr, momentum=wanted.momentum, weight_decay=wanted.weight_decay)
    if wanted.name == "rmsprop":
        own = {key: getattr(wanted, key) for key in ("lr", "weight_decay", "alpha", "eps", "momentum", "centered")}
        return torch.optim.RMSprop(groups, **own)
    kind = torch.optim.AdamW if wanted.name == "adamw" else torch.optim.Adam
    return kind(groups, lr=wanted.lr, weight_decay=wanted.weight_decay, eps=wanted.eps)


def factor_of(config: Config, step: int, steps: int) -> float:
    schedule: Any = config.train.schedule
    if schedule.name == "constant":
        return 1.0
    if step < schedule.warmup:
        return (step + 1) / schedule.warmup
    if schedule.name == "wsd":
        return min(1.0, (steps - 1 - step) / schedule.decay)
    gone = (step - schedule.warmup) / (steps - 1 - schedule.warmup)
    return schedule.min_lr_ratio + (1 - schedule.min_lr_ratio) * (1 + math.cos(math.pi * gone)) / 2


def _evaluated(task: Any, model: Any) -> dict[str, float]:
    """All of the validation data at once: `right` is a mean over samples, `loss` over tokens."""
    held = task.validation()
    batch = task.collate([held[i] for i in range(len(held))])
    modes = [(m, m.training) for m in model.modules()]
    model.eval()
    with torch.no_grad():
        found = task.by_scikit_learn(model, batch) if isinstance(task, Scored) else None
        if isinstance(task, Pairs):
            found = {"loss": task.by_hand(model, [batch], _leave_seed)}
        found = found or task.metrics(model, batch)
    for m, training in modes:
        m.training = training
    return {name: float(value[0] if isinstance(value, tuple) else value) for name, value in found.items()}


def _cast(batch: Any, dtype: torch.dtype) -> Any:
    if isinstance(batch, list):
        return [b.to(dtype) for b in batch]
    return batch
