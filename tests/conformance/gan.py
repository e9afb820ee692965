"""Two parts that train against each other, and the same written out by hand in one process."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import Dataset
from typing_extensions import override

import unipar
from unipar.data.dataset import SeededDataset
from unipar.data.order import SampleOrder, split_batch
from unipar.utils.seeding import mix_seed, seed_all

if TYPE_CHECKING:
    from tests.conformance.cases import Case
    from tests.conformance.plain import Result

N, D = 3, 12
EVERY = 2
"""Shares in which the critic steps, for one in which the generator does."""

Pair = tuple[Tensor, Tensor]
Apply = Callable[[Any, Any], Any]


class Points(Dataset[Pair]):
    """Noise that is drawn when it is read, and a point."""

    def __len__(self) -> int:
        return 64

    @override
    def __getitem__(self, index: int) -> Pair:
        return torch.randn(N), torch.tensor([math.sin(index), math.cos(3 * index)])


class Net(nn.Module):
    """Blocks; a parameter and a buffer that are read outside of forward."""

    def __init__(self, inside: int, outside: int, *, norm: bool, dropout: float) -> None:
        super().__init__()
        self.first = nn.Linear(inside, D)
        self.norm = nn.BatchNorm1d(D) if norm else nn.LayerNorm(D)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, D)) for _ in "ab")
        self.dropout = nn.Dropout(dropout)
        self.last = nn.Linear(D, outside)
        self.gain = nn.Parameter(torch.full((1,), 1.5))
        self.shift: Tensor
        self.register_buffer("shift", torch.randn(outside) / 4)

    @override
    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(F.gelu(self.first(x)))
        for block in self.blocks:
            x = self.dropout(x + block(x))
        return self.last(x)


def apply(model: Any, given: Any) -> Any:
    """Outputs for several inputs, through a parameter that no forward reads."""
    return [model(x) * model.gain + model.shift for x in given]


class Gan(unipar.Task):
    def __init__(self, *, norm: bool = False, dropout: float = 0.0) -> None:
        self.settings: dict[str, Any] = {"norm": norm, "dropout": dropout}
        self.frozen: Callable[[str], Apply]

    @override
    def model(self) -> dict[str, Any]:
        return {"generator": Net(N, 2, **self.settings), "critic": Net(2, 1, **self.settings)}

    @override
    def data(self) -> Any:
        return Points()

    @override
    def train(self, run: unipar.Run) -> None:
        self.frozen = run.frozen
        for local_batch in run.batches():
            run.step(local_batch, part="critic", loss=self.critic_loss)
            if (run.done + 1) % EVERY == 0:
                run.step(local_batch, part="generator")

    @override
    def loss(self, model: Any, batch: Pair) -> Tensor:
        (made,) = apply(model, batch[:1])
        (judged,) = self.frozen("critic")(apply, (made,))
        return F.softplus(-judged.float() if judged.dtype == torch.bfloat16 else -judged).mean()

    def critic_loss(self, model: Any, batch: Pair) -> Tensor:
        noise, real = batch
        (made,) = self.frozen("generator")(apply, (noise,))
        once, twice = apply(model, (real, made))
        if once.dtype == torch.bfloat16:
            once, twice = once.float(), twice.float()
        return (F.softplus(-once) + F.softplus(twice)).mean()


def train_gan_by_hand(case: Case, result: Result, size: int) -> Result:
    """Both parts in one process: two optimizers, and no gradient but of the part whose turn it is."""
    from tests.conformance.cases import dtype_of
    from tests.conformance.plain import ONE, factor_of, optimizer_of

    config, task, dtype = case.config(ONE, size), Gan(**case.kwargs), dtype_of(case)
    seed = config.train.seed
    seed_all(seed)
    parts = {name: module.to(dtype) for name, module in task.model().items()}
    task.frozen = lambda name: lambda fn, given: fn(parts[name], given)
    own = {name: config.of_part(name) for name in parts}
    optimizers = {name: optimizer_of(own[name], part) for name, part in parts.items()}
    rates = {name: [g["lr"] for g in o.param_groups] for name, o in optimizers.items()}
    steps, total = config.train.steps or 0, config.batch.total or 0
    seen, sizes = SeededDataset(Points(), seed), config.batch.settle(size)
    last: dict[str, tuple[float, float]] = {}
    for step, (epoch, indices) in zip(
        range(steps), SampleOrder(64, total, seed, True, "weigh").batches(0), strict=False
    ):
        cuts = (
            [mine for micro in split_batch(indices, sizes.accumulate, size) for mine in micro]
            if case.micro
            else [indices]
        )
        batches = [[t.to(dtype) for t in task.collate([seen[epoch, i] for i in mine])] for mine in cuts]
        for name in ("critic", "generator")[: 1 + ((step + 1) % EVERY == 0)]:
            for other, part in parts.items():
                part.requires_grad_(other == name)
            loss_of: Any = task.critic_loss if name == "critic" else task.loss
            whole = 0.0
            for i, batch in enumerate(batches):
                seed_all(mix_seed(seed, 3, step, i, list(parts).index(name)))
                loss = loss_of(parts[name], batch) / len(batches)
                loss.backward()
                whole += loss.item()
            clip = own[name].train.clipping
            norm = float(clip_grad_norm_(parts[name].parameters(), clip.max if clip else math.inf))
            assert clip is None or norm > clip.max, "the clip does not bite"
            for group, lr in zip(optimizers[name].param_groups, rates[name], strict=True):
                group["lr"] = lr * factor_of(config, step, steps)
            optimizers[name].step()
            optimizers[name].zero_grad()
            last[name] = (whole, norm)
            result.parts.setdefault(name, []).append(whole)
        result.losses.append(sum(loss for loss, _ in last.values()))
        result.norms.append(math.hypot(*(norm for _, norm in last.values())))
    result.params = {f"{part}.{n}": p.detach().flatten() for part, m in parts.items() for n, p in m.named_parameters()}
    return result
