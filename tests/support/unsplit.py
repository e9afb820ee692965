"""Tasks that a mesh can split in few ways, or in none: skips, values read inside blocks, a name that is none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from typing_extensions import override

import unipar
from tests.support.stacked import Stack, Stacked, V


class Skipping(Stacked):
    """The first block's output is read by the last: only the cut right behind the first block is possible."""

    def __init__(self, cuts: Sequence[str] | None = None) -> None:
        super().__init__(skip=True)
        self.given = cuts

    @override
    def cuts(self, stages: int) -> Sequence[str] | None:
        return self.given


class _AllRead(Stack):
    """What is inside each block is read at the model's end."""

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        read: list[Tensor] = []
        hooks = [
            block.get_submodule("out").register_forward_hook(lambda _, args, out: read.append(out.mean()))
            for block in self.blocks
        ]
        try:
            return super().forward(tokens) * (1 + torch.stack(read).sum())
        finally:
            for hook in hooks:
                hook.remove()


class Reading(Stacked):
    @override
    def model(self) -> nn.Module:
        return _AllRead(**self.settings)

    @override
    def cuts(self, stages: int) -> Sequence[str] | None:
        return None


class Misnamed(Stacked):
    @override
    def tensor(self, model: nn.Module) -> Mapping[str, str]:
        return {"blocks.*.query": "column"}


class FrozenBelow(Stacked):
    """The embedding and the first two of four blocks are frozen: what a first stage has."""

    @override
    def model(self) -> nn.Module:
        model = super().model()
        for name in ("token", "blocks.0", "blocks.1"):
            model.get_submodule(name).requires_grad_(requires_grad=False)
        return model


class Unsummed(Stacked):
    """Ranks of tensor do not add up: behind rows (`leave`), or the gradients of what columns get (`enter`)."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    @override
    def model(self) -> nn.Module:
        from unipar_mesh.tensor import tensor_parallel  # only workers have it

        def alone(x: Tensor, *_: object, **__: object) -> Tensor:
            return x

        mock.patch.object(tensor_parallel, self.where, alone).start()  # until this worker ends
        return super().model()


class Stray(Stacked):
    """The gradient of the head is another under a mesh: what no block shows."""

    @override
    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        loss = super().loss(model, batch)
        whole = model.get_submodule("blocks.0.up").get_parameter("weight").shape[0] == 64
        return loss if whole else loss + (loss - loss.detach())


class Encoded(Stacked):
    """Layers of torch, which without gradients call one kernel in place of their modules."""

    @override
    def model(self) -> nn.Module:
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
        return nn.Sequential(nn.Embedding(V, 16), nn.TransformerEncoder(layer, 2), nn.Linear(16, V))

    @override
    def cuts(self, stages: int) -> Sequence[str] | None:
        return None

    @override
    def validation(self) -> TensorDataset:
        return self.data()


class _TwoTowers(nn.Module):
    """Towers side by side, the first of which takes no time beside the second."""

    def __init__(self) -> None:
        super().__init__()
        self.images = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 6))
        self.texts = nn.Sequential(nn.Linear(4, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 6))


class Towers(unipar.Task):
    """Two towers, contrastive: a pipeline can cut within the first, or between both."""

    @override
    def model(self) -> nn.Module:
        return _TwoTowers()

    @override
    def data(self) -> TensorDataset:
        g = torch.Generator().manual_seed(0)
        return TensorDataset(torch.randn(16, 4, generator=g), torch.randn(16, 4, generator=g))

    @override
    def features(self, model: Any, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return F.normalize(model.images(batch[0]), dim=-1), model.texts(batch[1])

    @override
    def loss_across(self, features: tuple[Tensor, Tensor]) -> Tensor:
        images, texts = features
        return F.cross_entropy(images @ texts.T, torch.arange(len(images), device=images.device))
