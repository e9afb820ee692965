"""Task that trains what tests/support/foreign_trainers.py trains without unipar, on the same samples."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from typing_extensions import override

import unipar
from tests.support.foreign_trainers import WIDTH, make_net, samples


class Foreign(unipar.Task):
    @override
    def model(self) -> nn.Module:
        return make_net()

    @override
    def data(self) -> Any:
        return TensorDataset(*samples())

    @override
    def loss(self, model: Any, batch: Any) -> Tensor:
        x, y = batch
        return (model(x) - y).square().mean()


class Alike(Foreign):
    """Task with two equal layers."""

    @override
    def model(self) -> nn.Module:
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)))


class InGroups(Alike):
    """The same with groups of its own: the second layer first."""

    @override
    def groups(self, model: Any) -> list[dict[str, Any]]:
        return [{"params": model[1].parameters()}, {"params": model[0].parameters()}]


class ForeignOnFrozenBase(Foreign):
    """The same net with its inner layer frozen in bf16."""

    @override
    def model(self) -> nn.Module:
        net = make_net()
        net.inner.to(torch.bfloat16).requires_grad_(False)
        return net
