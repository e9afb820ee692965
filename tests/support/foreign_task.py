"""Task that trains what tests/support/foreign_trainers.py trains without unipar, on the same samples."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils.data import TensorDataset
from typing_extensions import override

import unipar
from tests.support.foreign_trainers import make_net, samples


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
