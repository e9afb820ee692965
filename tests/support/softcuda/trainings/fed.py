"""Character GPTs whose ranks have to add up what they have read in each step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset
from typing_extensions import override

from tests.support.softcuda.trainings.stepwise import StepwiseGPT


class WeighedGPT(StepwiseGPT):
    """The loss is a mean over characters, which are counted in each batch."""

    @override
    def weight(self, batch: Any) -> float:
        return float(batch[0].numel())


class _OwnStream(IterableDataset[tuple[Tensor, ...]]):
    """Samples of one rank."""

    def __init__(self, samples: list[tuple[Tensor, ...]]) -> None:
        self.samples = samples

    @override
    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        return iter(self.samples)


class StreamedGPT(StepwiseGPT):
    """Each rank reads a stream of its own."""

    @override
    def data(self) -> Any:
        windows = super().data()
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        return _OwnStream([windows[i] for i in range(rank, 200, 2)])
