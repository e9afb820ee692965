"""Tasks that `verify` must say something about, besides whether the strategies agree."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from tests.conformance import tasks


class Contrast(tasks.Plain):
    """Contrasts each sentence with all others of its batch."""

    @override
    def loss(self, model: Any, batch: tasks.Batch) -> Tensor:
        means = F.normalize(model.encode(batch.tokens[:, :-1]).mean(1), dim=-1)
        return super().loss(model, batch) + F.cross_entropy(means @ means.T * 5, torch.arange(len(means)))


class _Experts(tasks.Tiny):
    """Four experts behind a router that computes in fp32, as routers do; returns logits and how uneven the load is."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(tasks.D, 4, bias=False)
        nn.init.normal_(self.gate.weight, std=0.02)  # so the load is almost even at first, as usual
        self.experts = nn.ModuleList(nn.Linear(tasks.D, tasks.V) for _ in range(4))

    @override
    def forward(self, tokens: Tensor, use_extra: bool = False) -> Any:
        x = self.encode(tokens)
        shares = self.gate(x).float().softmax(-1)
        chosen = F.one_hot(shares.argmax(-1), 4).float()
        logits = sum(e(x) * (chosen * shares)[..., i, None] for i, e in enumerate(self.experts))
        return self.head(x) + logits, 4 * (chosen.mean((0, 1)) * shares.mean((0, 1))).sum()


class Balanced(tasks.Plain):
    """A mixture of experts with a loss that balances their load over the batch."""

    def __init__(self, balance: float) -> None:
        super().__init__()
        self.balance = balance

    @override
    def model(self) -> nn.Module:
        return _Experts()

    @override
    def loss(self, model: Any, batch: tasks.Batch) -> Tensor:
        logits, load = model(batch.tokens[:, :-1])
        return F.cross_entropy(logits.float().transpose(1, 2), batch.tokens[:, 1:]) + self.balance * load


class Drawing(tasks.Plain):
    """A loss that draws random numbers, which no strategy draws in another way."""

    @override
    def loss(self, model: Any, batch: tasks.Batch) -> Tensor:
        return super().loss(model, batch) * (1 + 0.1 * torch.rand(()))


class Summed(tasks.Plain):
    """A sum over the batch instead of the mean."""

    @override
    def loss(self, model: Any, batch: tasks.Batch) -> Tensor:
        return super().loss(model, batch) * len(batch.tokens)


def refuse_fp64(model: Any) -> None:
    """Raise what a kernel raises that takes no double."""
    if model.head.weight.dtype == torch.float64:
        raise RuntimeError("expected Float, got Double\nand more lines")


class NormedWithoutDouble(tasks.Normed):
    """BatchNorm, in a model that cannot run in fp64."""

    @override
    def loss(self, model: Any, batch: tasks.Batch) -> Tensor:
        refuse_fp64(model)
        return super().loss(model, batch)


class InSinglePrecision(tasks.Tokens):
    """A mean over tokens, in a model that cannot run in fp64."""

    @override
    def loss(self, model: Any, batch: tasks.Batch) -> Tensor:
        refuse_fp64(model)
        return super().loss(model, batch)


class RankScaled(tasks.Plain):
    """A loss that is larger on rank 1, in a model that cannot run in fp64."""

    @override
    def loss(self, model: Any, batch: tasks.Batch) -> Tensor:
        refuse_fp64(model)
        loss = super().loss(model, batch)
        return loss * 1.01 if dist.get_rank() == 1 else loss


class WorldScaled(tasks.Plain):
    """A loss that is divided by the number of ranks."""

    @override
    def loss(self, model: Any, batch: tasks.Batch) -> Tensor:
        return super().loss(model, batch) / dist.get_world_size()


class Broken(tasks.Plain):
    """A loss that raises in every precision, in fp64 something else."""

    @override
    def loss(self, model: Any, batch: tasks.Batch) -> Tensor:
        refuse_fp64(model)
        raise LookupError("no such word")


class NeverOne(tasks.Plain):
    """A loss that one sample is too few for, as it is for a BatchNorm behind global pooling."""

    @override
    def loss(self, model: Any, batch: tasks.Batch) -> Tensor:
        if len(batch.tokens) == 1:
            raise ValueError("expected more than 1 sample")
        return super().loss(model, batch)


class Unseeded(tasks.Sentences):
    """Random from a source that nobody can seed."""

    @override
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        tokens, length = super().__getitem__(index)
        return (tokens + os.urandom(1)[0]) % tasks.V, length


class UnseededTask(tasks.Plain):
    @override
    def data(self) -> Any:
        return Unseeded()


class UnseededStream(tasks.Flow):
    """The same, one after another."""

    def __init__(self, count: int) -> None:
        self.inner = Unseeded(count)


class UnseededStreamTask(tasks.Plain):
    @override
    def data(self) -> Any:
        return UnseededStream(40)


class _ByNorm(torch.optim.Optimizer):
    """Each tensor moves by its rate, whatever the size of its gradient."""

    def __init__(self, groups: Sequence[dict[str, Any]]) -> None:
        super().__init__(groups, {"lr": 1e-2, "weight_decay": 0.0})

    @override
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / p.grad.norm().clamp(min=1e-12), alpha=group["lr"])


class ByNorm(tasks.Plain):
    @override
    def optimizer(self, groups: Sequence[dict[str, Any]]) -> torch.optim.Optimizer:
        return _ByNorm(groups)
