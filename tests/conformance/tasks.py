"""What a user may write: tasks in plain PyTorch, each with something that trips some library."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset
from typing_extensions import override

import unipar

V, D, T = 29, 16, 8

BLOCKS = [2]
"""Number of blocks of the models: a strategy with more stages needs more."""

EXPERTS = [0]
"""Number of experts in each block of the models: none where a strategy splits no experts."""


class Batch(NamedTuple):
    tokens: Tensor
    lengths: Tensor


class Sentences(Dataset[tuple[Tensor, int]]):
    """Sequences of ragged length; each third token follows from the one before it."""

    def __init__(self, count: int = 64, masked: tuple[int, ...] = ()) -> None:
        g = torch.Generator().manual_seed(5)
        self.tokens = torch.randint(0, V, (count, T + 1), generator=g)
        self.tokens[:, 2::3] = (self.tokens[:, 1::3][:, : self.tokens[:, 2::3].shape[1]] * 7 + 3) % V
        self.lengths = torch.randint(1, T + 1, (count,), generator=g)
        self.lengths[list(masked)] = 0

    def __len__(self) -> int:
        return len(self.tokens)

    @override
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.tokens[index], int(self.lengths[index])


class Noisy(Dataset[tuple[Tensor, int]]):
    """The same, read with noise from all three generators that a user's transform may draw from."""

    def __init__(self) -> None:
        self.inner = Sentences()

    def __len__(self) -> int:
        return len(self.inner)

    @override
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        tokens, length = self.inner[index]
        shift = int(torch.randint(0, 3, ())) + random.randint(0, 3) + int(np.random.randint(0, 3))
        return (tokens + shift) % V, length


def mixture() -> tuple[nn.Module, Any]:
    """Return a layer of experts of transformers, and its config.

    Its router chooses clearly, and experts add little, so that tokens which rounding sends elsewhere change little.
    """
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    config = MixtralConfig(hidden_size=D, intermediate_size=D, num_local_experts=EXPERTS[0], num_experts_per_tok=2)
    layer = MixtralSparseMoeBlock(config)
    for name, p in layer.named_parameters():
        nn.init.normal_(p, std=0.5 if name == "gate.weight" else 0.12)
    return layer, config


class Block(nn.Module):
    seen: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, 3 * D), nn.Linear(3 * D, D)
        self.mixture: nn.Module | None = None
        if EXPERTS[0]:
            self.mixture, self.config = mixture()

    @override
    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x)
        h = self.norm(x)[:, None]
        past = F.scaled_dot_product_attention(h, h, h, is_causal=True)[:, 0]
        x = x + self.down(F.gelu(self.up(past)))
        return x if self.mixture is None else x + self.mixture(self.norm(x))


class Tiny(nn.Module):
    """Blocks in a line; a buffer that is not saved and a plain tensor attribute, as rotary tables often are."""

    def __init__(self, *, teacher: bool = False, tied: bool = False, extra: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(V, D)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS[0]))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(D, V, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.extra = nn.Linear(D, D) if extra else None
        self.register_buffer("positions", torch.randn(T, D) / 8, persistent=False)
        self.table = torch.randn(T, D) / 8
        self._shift = torch.randn(D) / 8  # the same, behind an underscore
        self.register_buffer("turn", torch.polar(torch.ones(D // 2), torch.linspace(0, 1, D // 2)), persistent=False)
        self.held = [self.embed.weight]  # a parameter that is kept in a list as well
        self.seen: list[Tensor] = []  # filled by the blocks, read by the loss
        for block in self.blocks:
            vars(block)["seen"] = self.seen
        self.teacher: nn.Module | None = None
        if teacher:
            self.teacher = nn.Sequential(Tiny(), nn.Dropout(0.5)).requires_grad_(False).eval()

    def encode(self, tokens: Tensor) -> Tensor:
        self.seen.clear()  # else a compiled block is compiled again in each step: the list's length is guarded
        n = tokens.shape[1]
        positions: Any = self.positions
        x = self.embed(tokens) + positions[:n] + self.table[:n] + self._shift
        turn: Any = self.turn  # complex, as rotary tables often are
        x = x + torch.view_as_real(turn).flatten().to(x.dtype) / 8
        for block in self.blocks:
            x = self.dropout(block(x))
        return x

    @override
    def forward(self, tokens: Tensor, use_extra: bool = False) -> Tensor:
        x = self.encode(tokens)
        if use_extra and self.extra is not None:
            x = x + self.extra(x)
        return self.head(x)


def to_float32(logits: Tensor) -> Tensor:
    """A mean of bf16 numbers would lose what is measured here."""
    return logits.float() if logits.dtype == torch.bfloat16 else logits


def token_mean(logits: Tensor, batch: Batch) -> Tensor:
    losses = F.cross_entropy(to_float32(logits).transpose(1, 2), batch.tokens[:, 1:], reduction="none")
    seen = torch.arange(losses.shape[1], device=losses.device) < batch.lengths[:, None]
    return (losses * seen).sum() / seen.sum()


class Plain(unipar.Task):
    """A mean over samples: every sequence counts the same, whatever its length."""

    def __init__(self, count: int = 64, **model: Any) -> None:
        self.count, self.settings = count, model

    @override
    def model(self) -> nn.Module:
        return Tiny(**self.settings)

    @override
    def data(self) -> Any:
        return Sentences(self.count)

    @override
    def collate(self, samples: list[Any]) -> Batch:
        return Batch(torch.stack([t for t, _ in samples]), torch.tensor([n for _, n in samples]))

    @override
    def loss(self, model: Any, batch: Batch) -> Tensor:
        return F.cross_entropy(to_float32(model(batch.tokens[:, :-1])).transpose(1, 2), batch.tokens[:, 1:])

    @override
    def validation(self) -> Any:
        return Sentences(21)

    @override
    def metrics(self, model: Any, batch: Batch) -> Mapping[str, Any]:
        logits = model(batch.tokens[:, :-1])
        right = (logits.argmax(-1) == batch.tokens[:, 1:]).double().mean()
        tokens = batch.lengths.sum()
        return {"right": right, "loss": (token_mean(logits, batch), tokens)}


class Pretrained(Plain):
    """A model that arrives in eval mode, as from_pretrained returns it."""

    @override
    def model(self) -> nn.Module:
        return super().model().eval()


class Tokens(Plain):
    """A mean over tokens; five sequences have none at all."""

    @override
    def data(self) -> Any:
        return Sentences(self.count, masked=(3, 9, 11, 30, 31))

    @override
    def loss(self, model: Any, batch: Batch) -> Tensor:
        return token_mean(model(batch.tokens[:, :-1]), batch)

    @override
    def weight(self, batch: Batch) -> Tensor:
        return batch.lengths.sum()


class Grouped(Plain):
    @override
    def groups(self, model: nn.Module) -> Iterable[Mapping[str, Any]]:
        named = list(model.named_parameters())
        thin = [p for _, p in named if p.ndim < 2]
        wide = [p for _, p in named if p.ndim > 1]
        return [{"params": wide}, {"params": thin, "lr": 3e-3, "weight_decay": 0.0}]


class Owning(Grouped):
    """An optimizer of the task's own, which goes element by element."""

    @override
    def optimizer(self, groups: Sequence[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.RMSprop(groups, alpha=0.9, eps=1e-4)


class Distilled(Plain):
    """A frozen teacher in eval mode, with dropout that must not wake."""

    def __init__(self) -> None:
        super().__init__(teacher=True)

    @override
    def loss(self, model: Any, batch: Batch) -> Tensor:
        with torch.no_grad():
            target = model.teacher(batch.tokens[:, :-1])
        logits = model(batch.tokens[:, :-1])
        return super().loss(model, batch) + (logits - target).square().mean()


class Reaching(Plain):
    """Calls a method, ties in the loss, reads a parameter whose module is never called."""

    @override
    def loss(self, model: Any, batch: Batch) -> Tensor:
        x = model.encode(batch.tokens[:, :-1])
        logits = x @ model.embed.weight.T
        return F.cross_entropy(logits.transpose(1, 2), batch.tokens[:, 1:]) + 0.1 * model.head.weight.square().mean()


class BlockReading(Plain):
    """Reads a parameter of a block outside the block's own forward."""

    @override
    def loss(self, model: Any, batch: Batch) -> Tensor:
        return super().loss(model, batch) + 0.1 * model.blocks[0].up.weight.square().mean()


class Sharing(Plain):
    """Blocks leave something in a list that the model shares with them, for the loss to read."""

    @override
    def loss(self, model: Any, batch: Batch) -> Tensor:
        loss = super().loss(model, batch)
        assert len(model.seen) == BLOCKS[0]
        return loss + 0.1 * to_float32(model.seen[1]).square().mean()


class Thrice(Plain):
    """Three forwards in one loss."""

    @override
    def loss(self, model: Any, batch: Batch) -> Tensor:
        other = Batch(batch.tokens.flip(1), batch.lengths)
        flat = model(batch.tokens[:, :-1].roll(1, 1)).square().mean()
        return 0.5 * super().loss(model, batch) + 0.5 * super().loss(model, other) + 4 * flat


class Unused(Plain):
    """A module that the loss never uses."""

    def __init__(self) -> None:
        super().__init__(extra=True)


class AtTimes(Plain):
    """A module that is used in every second step only: told by the batch, the same on all ranks."""

    def __init__(self) -> None:
        super().__init__(extra=True)
        self.calls = 0

    @override
    def loss(self, model: Any, batch: Batch) -> Tensor:
        self.calls += 1
        logits = model(batch.tokens[:, :-1], use_extra=self.calls % 2 == 1)
        return F.cross_entropy(logits.transpose(1, 2), batch.tokens[:, 1:])


class OneRank(Plain):
    """A module that only the rank uses which holds the first sample of the data."""

    def __init__(self) -> None:
        super().__init__(extra=True)

    @override
    def loss(self, model: Any, batch: Batch) -> Tensor:
        first = Sentences(1).tokens[0]
        here = bool((batch.tokens == first).all(1).any())
        logits = model(batch.tokens[:, :-1], use_extra=here)
        return F.cross_entropy(logits.transpose(1, 2), batch.tokens[:, 1:])


class Scalar(Plain):
    """A parameter without dimensions."""

    @override
    def model(self) -> nn.Module:
        model = Tiny()
        model.register_parameter("scale", nn.Parameter(torch.tensor(1.0)))
        return model

    @override
    def loss(self, model: Any, batch: Batch) -> Tensor:
        logits = model(batch.tokens[:, :-1]) * model.scale
        return F.cross_entropy(logits.transpose(1, 2), batch.tokens[:, 1:])


class Normed(Plain):
    """BatchNorm: its statistics are those of a microbatch, in every strategy."""

    @override
    def model(self) -> nn.Module:
        model = Tiny()
        model.add_module("norm", nn.BatchNorm1d(D))
        return model

    def logits(self, model: Any, batch: Batch) -> Tensor:
        x = model.encode(batch.tokens[:, :-1])
        x = F.gelu(x)  # else the bias before the norm has no true gradient, and Adam moves it by rounding noise
        return model.head(model.norm(x.transpose(1, 2)).transpose(1, 2))

    @override
    def loss(self, model: Any, batch: Batch) -> Tensor:
        return F.cross_entropy(self.logits(model, batch).transpose(1, 2), batch.tokens[:, 1:])

    @override
    def metrics(self, model: Any, batch: Batch) -> Mapping[str, Any]:
        return {"right": (self.logits(model, batch).argmax(-1) == batch.tokens[:, 1:]).double().mean()}


class Transformed(Plain):
    """Data with random noise in it."""

    @override
    def data(self) -> Any:
        return Noisy()


class Loaded(Plain):
    """A DataLoader with worker processes of its own."""

    @override
    def data(self) -> Any:
        return DataLoader(Noisy(), batch_size=16, shuffle=True, num_workers=1, collate_fn=super().collate)


class Flow(IterableDataset[tuple[Tensor, int]]):
    """Sentences one after another."""

    def __init__(self, count: int) -> None:
        self.inner = Sentences(count)

    @override
    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        return (self.inner[i] for i in range(len(self.inner)))


class Streamed(Plain):
    """Two and a half batches an epoch, and nobody says so."""

    @override
    def data(self) -> Any:
        return Flow(40)


class Poisoned(Plain):
    """A loss that is not a number for the one sample that comes in the fourth step."""

    def __init__(self, bad: int) -> None:
        super().__init__()
        self.bad = bad

    @override
    def loss(self, model: Any, batch: Batch) -> Tensor:
        here = (batch.tokens == Sentences().tokens[self.bad]).all(1).any()
        return super().loss(model, batch) * torch.where(here, float("nan"), 1.0)


class Regression(unipar.Task):
    """Floating-point inputs, which some precisions must cast; a convolution."""

    @override
    def model(self) -> nn.Module:
        blocks = [nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.GELU()) for _ in range(BLOCKS[0])]
        return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Sequential(*blocks), nn.Flatten(), nn.Linear(4 * 36, 3))

    @override
    def data(self) -> Any:
        g = torch.Generator().manual_seed(3)
        x = torch.randn(48, 1, 6, 6, generator=g)
        y = torch.stack([x.mean((1, 2, 3)), x.amax((1, 2, 3)), x[:, 0, 0, 0]], 1)
        return torch.utils.data.TensorDataset(x, y)

    @override
    def loss(self, model: Any, batch: Any) -> Tensor:
        x, y = batch
        return (to_float32(model(x)) - y).square().mean()


class OneWeight(Regression):
    """A single parameter, which most ranks have no part of where whole ones are given away."""

    @override
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(36, 3, bias=False))
