"""Tasks of the corpus: a small GPT over texts of ragged length, with what the errors of others need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.data import TensorDataset
from typing_extensions import override

import unipar
from tests.support.stacked import Block, T, V

WIDTH, IGNORED, EXPERTS = 16, -100, 4


class Positions(nn.Module):
    """Sines of the positions, from a table of frequencies that is a buffer, as rotary embeddings have it."""

    inv_freq: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 1000.0 ** -(torch.arange(WIDTH) / WIDTH), persistent=False)

    @override
    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device, dtype=self.inv_freq.dtype)
        return x + torch.sin(positions[:, None] * self.inv_freq)


class Texter(nn.Module):
    """GPT whose head has the weights of its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.positions = nn.Embedding(V, WIDTH), Positions()
        self.blocks = nn.ModuleList(Block(WIDTH, 0.1, batch_norm=False) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, V, bias=False)
        self.head.weight = self.token.weight

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.positions(self.token(tokens))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Texts(unipar.Task):
    """64 texts of 1 to 8 tokens, four batches an epoch: every microbatch has another number of tokens."""

    @override
    def model(self) -> nn.Module:
        return Texter()

    @override
    def cuts(self, stages: int) -> Sequence[str]:
        return [f"blocks.{stage}" for stage in range(1, stages)]

    @override
    def data(self) -> TensorDataset:
        generator = torch.Generator().manual_seed(7)
        tokens = torch.randint(0, V, (64, T + 1), generator=generator)
        tokens[:, 2::2] = (tokens[:, 1::2] * 5 + 2) % V
        lengths = torch.randint(1, T + 1, (64, 1), generator=generator)
        return TensorDataset(tokens[:, :-1], tokens[:, 1:].masked_fill(torch.arange(T) >= lengths, IGNORED))

    @override
    def weight(self, batch: tuple[Tensor, Tensor]) -> float:
        return float((batch[1] != IGNORED).sum())

    @override
    def loss(self, model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), ignore_index=IGNORED)


class Balance(nn.Module):
    """Loss that is smallest if all experts get the same part of the tokens, as Switch Transformers have it."""

    @override
    def forward(self, scores: Tensor, chosen: Tensor) -> Tensor:
        tokens = F.one_hot(chosen, EXPERTS).to(scores.dtype).mean((0, 1, 2))
        return EXPERTS * (tokens * scores.mean((0, 1))).sum()


class Weigh(nn.Module):
    """Sum of what a token's experts return, by the weights of the router."""

    @override
    def forward(self, outputs: Tensor, weights: Tensor) -> Tensor:
        return (outputs * weights[..., None]).sum(-2)


class Experts(nn.Module):
    """Layer of experts: a router sends each token to two of four, whose matrices are stacked."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.weigh, self.balance = nn.Linear(WIDTH, EXPERTS, bias=False), Weigh(), Balance()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) * WIDTH**-0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) * WIDTH**-0.5)

    @override
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the experts add, and the loss that balances them."""
        scores = self.router(x).softmax(-1)
        weights, chosen = scores.topk(2)
        outputs = F.gelu(x[..., None, None, :] @ self.up[chosen]) @ self.down[chosen]
        return self.weigh(outputs.squeeze(-2), weights), self.balance(scores, chosen)


class ExpertTexter(Texter):
    """The same with a layer of experts between blocks and head; it returns their auxiliary loss, too."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = Experts()

    @override
    def forward(self, tokens: Tensor) -> Any:
        x = self.positions(self.token(tokens))
        for block in self.blocks:
            x = block(x)
        added, auxiliary = self.experts(self.norm(x))
        return self.head(x + added), auxiliary


class PartlyTrained(Texter):
    """The same with frozen parts, a layer that the loss does not use, and parameters of a single element."""

    def __init__(self, parts: Sequence[str]) -> None:
        super().__init__()
        self.unused = nn.Linear(WIDTH, V) if "unused" in parts else None
        self.single = nn.Parameter(torch.ones(1)) if "single" in parts else None
        self.unused_single = nn.Parameter(torch.ones(1)) if {"unused", "single"} <= {*parts} else None
        if "frozen" in parts:
            self.blocks[1].requires_grad_(requires_grad=False)
            self.norm.weight.requires_grad = False

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * (1.0 if self.single is None else self.single)


class ExpertTexts(Texts):
    """The same with experts, and with a loss that balances them."""

    @override
    def model(self) -> nn.Module:
        return ExpertTexter()

    @override
    def loss(self, model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        logits, auxiliary = model(batch[0])
        return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten(), ignore_index=IGNORED) + 0.1 * auxiliary


class PartlyTrainedTexts(Texts):
    """The same, of which only parts are trained: frozen, unused and single-element ones, beside the tied head."""

    def __init__(self, parts: Sequence[str] = ("frozen", "unused", "single")) -> None:
        self.parts = parts

    @override
    def model(self) -> nn.Module:
        return PartlyTrained(self.parts)


class MixedTexts(Texts):
    """The same, computed in bf16."""


class AdamTexts(Texts):
    """The same, trained by Adam, whose weight decay is part of the gradient."""


@final
class SmallMuon(Optimizer):
    """Momentum whose matrices are made orthogonal by Newton-Schulz steps before they are subtracted."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, {"lr": 1e-2, "weight_decay": 0.0})

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                momentum = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                momentum.mul_(0.9).add_(p.grad)
                p.sub_(orthogonal(momentum) if p.dim() == 2 else momentum, alpha=group["lr"])


def orthogonal(matrix: Tensor) -> Tensor:
    """Return a matrix of the same singular vectors whose singular values are about 1."""
    x = matrix / (matrix.norm() + 1e-7)
    for _ in range(4):
        x = 1.5 * x - 0.5 * x @ x.T @ x
    return x


class MuonTexts(Texts):
    """The same, trained by an optimizer that needs whole matrices."""

    @override
    def optimizer(self, groups: Any) -> Optimizer:
        return SmallMuon(groups)
