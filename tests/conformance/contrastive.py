"""Losses that compare all samples of the global batch: two towers, and one tower over pairs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

import unipar
from tests.conformance.tasks import Batch, Plain, Tiny


class Towers(nn.Module):
    """Two models side by side, and the temperature at which their outputs are compared."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.left, self.right = Tiny(**settings), Tiny(**settings)
        self.sharpness = nn.Parameter(torch.ones(1))


class Pairs(Plain):
    """InfoNCE between a sequence and the same sequence one token later; longer ones count more."""

    @override
    def model(self) -> nn.Module:
        return Towers(**self.settings)

    @override
    def features(self, model: Any, batch: Batch) -> Any:
        left, right = _pooled(model.left(batch.tokens[:, :-1])), _pooled(model.right(batch.tokens[:, 1:]))
        return {"left": left, "both": [right * model.sharpness.exp(), batch.lengths]}

    @override
    def loss_across(self, features: Any) -> Tensor:
        right, lengths = features["both"]
        logits, own = features["left"] @ right.T, torch.arange(len(right), device=right.device)
        losses = F.cross_entropy(logits, own, reduction="none") + F.cross_entropy(logits.T, own, reduction="none")
        return (losses * lengths).sum() / lengths.sum() + 0.01 * (right * own[:, None]).mean()

    loss = unipar.Task.loss
    metrics = unipar.Task.metrics

    def by_hand(self, model: Any, batches: list[Batch], seeds: Any) -> Tensor:
        """The same in one process with one graph: features of each microbatch, then the loss of all."""
        parts: list[Any] = []
        for i, batch in enumerate(batches):
            seeds(i)
            parts.append(self.features(model, batch))
        right = [torch.cat([part["both"][k] for part in parts]) for k in range(2)]
        return self.loss_across({"left": torch.cat([part["left"] for part in parts]), "both": right})


class OneTower(Pairs):
    """One model over both halves of each pair at once, so that each block runs once in a pass; any stage can cut it."""

    @override
    def model(self) -> nn.Module:
        model = Tiny(**self.settings)
        model.register_parameter("sharpness", nn.Parameter(torch.ones(1)))
        return model

    @override
    def features(self, model: Any, batch: Batch) -> Any:
        both = _pooled(model(torch.cat([batch.tokens[:, :-1], batch.tokens[:, 1:]])))
        left, right = both.chunk(2)
        return {"left": left, "both": [right * model.sharpness.exp(), batch.lengths]}


def _pooled(hidden: Tensor) -> Tensor:
    return F.normalize(hidden.mean(1), dim=-1)
