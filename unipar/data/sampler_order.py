"""`SamplerOrder`: the order of a user's own sampler, drawn once an epoch and the same on every rank."""

from __future__ import annotations

import hashlib
import random
from array import array
from collections.abc import Callable, Generator, Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from unipar.errors import TaskError
from unipar.utils.seeding import mix_seed, seed_all

_MOST_REPEATS, _LEAST_LIMIT = 10, 1_000_000
"""Limit of an epoch's indices, unless `len(sampler)` is more: this many for each sample, and at least this many."""

Agree = Callable[[str, Callable[[str], str]], None]
"""Function that compares this rank's text with that of rank 0, and raises its sentence if they differ."""


@final
class SamplerOrder:
    """Indices of each epoch as a sampler gives them; epochs are drawn in their order, each once."""

    def __init__(self, sampler: Iterable[Any], samples: int, seed: int, agree: Agree | None = None) -> None:
        """`samples`: those of the dataset. `agree`: called by all ranks together with each epoch's order."""
        self._sampler, self._samples, self._seed, self._agree = sampler, samples, seed, agree
        self._drawn: list[array[int]] = []

    def __call__(self, epoch: int) -> list[int]:
        """Return the indices of an epoch; raise TaskError if they are none of the data, or others on another rank."""
        while len(self._drawn) <= epoch:
            self._drawn.append(self._draw(len(self._drawn)))
        return self._drawn[epoch].tolist()

    @property
    def count(self) -> int:
        """Number of indices of an epoch."""
        return len(self._drawn[0] if self._drawn else self(0))

    def digest(self, epoch: int) -> str:
        """Return a hash of the order of an epoch."""
        self(epoch)
        return hashlib.sha256(self._drawn[epoch].tobytes()).hexdigest()[:16]

    def _draw(self, epoch: int) -> array[int]:
        with _seeded(mix_seed(self._seed, 5, epoch)):
            if callable(set_epoch := getattr(self._sampler, "set_epoch", None)):
                set_epoch(epoch)
            order = array("q", self._checked_indices(epoch))
        if not order:
            raise TaskError(f"{self._called} gave no index in epoch {epoch + 1}; it must yield at least one")
        if self._drawn and len(order) != len(self._drawn[0]):
            raise TaskError(
                f"{self._called} gave {len(self._drawn[0])} indices in epoch 1 and {len(order)} in epoch {epoch + 1}: "
                "the steps of a run follow from the first, so it must give as many in each"
            )
        if self._agree is not None:
            mine = f"{len(order)} indices ({hashlib.sha256(order.tobytes()).hexdigest()[:16]})"
            self._agree(mine, lambda first: self._differs(epoch, mine, first))
        return order

    def _checked_indices(self, epoch: int) -> Iterator[int]:
        """Yield what the sampler gives; raise TaskError if it does not come to an end."""
        try:
            promised = len(self._sampler) if isinstance(self._sampler, Sized) else 0
        except (TypeError, NotImplementedError):  # a sampler that says by it that it has no end
            promised = 0
        most = max(promised, _MOST_REPEATS * self._samples, _LEAST_LIMIT)
        for number, index in enumerate(self._sampler):
            if number == most:
                raise TaskError(
                    f"{self._called} gave {most:,} indices of {self._samples:,} samples in epoch {epoch + 1}, and goes "
                    "on: let it end after an epoch (unipar begins the next one), or give it a len()"
                )
            yield self._checked(index, epoch)

    def _checked(self, index: Any, epoch: int) -> int:
        if isinstance(index, np.integer) or (isinstance(index, Tensor) and index.numel() == 1):
            index = index.item()
        if not isinstance(index, int) or isinstance(index, bool):
            raise TaskError(
                f"{self._called} gave {index!r} in epoch {epoch + 1}; it must give the index of one sample at a time, "
                "and unipar makes the batches"
            )
        if not 0 <= index < self._samples:
            raise TaskError(
                f"{self._called} gave index {index} in epoch {epoch + 1}, and the dataset has {self._samples} samples, "
                f"0 to {self._samples - 1}: make the sampler for this dataset"
            )
        return index

    @property
    def _called(self) -> str:
        return f"the DataLoader's sampler ({type(self._sampler).__name__})"

    def _differs(self, epoch: int, mine: str, first: str) -> str:
        counts = mine.partition(" (")[0], first.partition(" (")[0]
        how = "other indices than on rank 0" if counts[0] == counts[1] else f"{counts[0]}, and {counts[1]} on rank 0"
        return (
            f"{self._called} gave {how} in epoch {epoch + 1}: every rank must see the whole order, and unipar divides "
            "it: do not divide it among ranks (num_replicas=1, rank=0), and draw from the global generators, which are "
            "seeded by train.seed and the epoch"
        )


@contextmanager
def _seeded(seed: int) -> Generator[None]:
    """Context manager: seed the global generators, and put them back at the end."""
    before = torch.random.get_rng_state(), random.getstate(), np.random.get_state()
    seed_all(seed, device=False)
    try:
        yield
    finally:
        torch.random.set_rng_state(before[0])
        random.setstate(before[1])
        np.random.set_state(before[2])
