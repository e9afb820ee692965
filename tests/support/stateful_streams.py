"""Streams that can be put back to a place, by the dataset or its iterator, and one that cannot."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset
from typing_extensions import override

from examples.char_gpt import CharGPT

COUNT = 14
"""Samples of an epoch, unless said otherwise."""


class Plain(IterableDataset[Any]):
    """Numbers in an order of its own in each epoch, with noise; nothing puts it back."""

    def __init__(self, count: int = COUNT, first: int = 0, by: int = 1) -> None:
        self.numbers, self.opened, self.given = range(first, count, by), 0, 0

    @override
    def __iter__(self) -> Iterator[Any]:
        self.opened += 1
        for x in self.numbers:
            self.given += 1
            yield torch.tensor([float(x) + 1]), torch.tensor([2.0 * x]) + torch.rand(()).round(decimals=3)

    def shard(self, index: int, count: int) -> Plain:
        return type(self)(self.numbers.stop, index, count)


class Stateful(Plain):
    """The same with a state: a place, and things that JSON has no word for."""

    def __init__(self, count: int = COUNT, first: int = 0, by: int = 1) -> None:
        super().__init__(count, first, by)
        self.at, self.loaded = 0, 0
        self.kept: Any = None

    @override
    def __iter__(self) -> Iterator[Any]:
        self.opened += 1
        while self.at < len(self.numbers):
            x = self.numbers[self.at]
            self.at += 1
            self.given += 1
            self.kept = (x, {"seen": torch.arange(float(self.at)), 3: np.arange(2) + x}, float("inf"), b"\x00\xff")
            yield torch.tensor([float(x) + 1]), torch.tensor([2.0 * x]) + torch.rand(()).round(decimals=3)
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "kept": self.kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.kept, self.loaded = state["at"], state["kept"], self.loaded + 1


class OnIterator(Plain):
    """State that belongs to the iterator, as torchdata allows as well."""

    @override
    def __iter__(self) -> Iterator[Any]:
        return _Place(self.numbers)


class _Place:
    def __init__(self, numbers: range) -> None:
        self.numbers, self.at = numbers, 0

    def __iter__(self) -> _Place:
        return self

    def __next__(self) -> Any:
        if self.at == len(self.numbers):
            raise StopIteration
        x = self.numbers[self.at]
        self.at += 1
        return torch.tensor([float(x) + 1]), torch.tensor([2.0 * x]) + torch.rand(()).round(decimals=3)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Samples(IterableDataset[Any]):
    """First samples of a map dataset, as a stream with a state."""

    def __init__(self, dataset: Any, count: int) -> None:
        self.dataset, self.count, self.at = dataset, count, 0

    @override
    def __iter__(self) -> Iterator[Any]:
        while self.at < self.count:
            self.at += 1
            yield self.dataset[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class StreamedGPT(CharGPT):
    """Character GPT whose samples come as a stream: 40 in an epoch."""

    @override
    def data(self) -> Any:
        return Samples(super().data(), 40)
