"""Global order of samples, and the division of a batch among ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from unipar.errors import ConfigError, TaskError
from unipar.utils.seeding import mix_seed

SampleKey = tuple[int, int]
"""Key of one sample: (epoch, index)."""


@dataclass(frozen=True)
class SampleOrder:
    """Global batches of a run; they depend on the data, the seed and the batch size, not on the number of ranks."""

    samples: int
    total: int
    seed: int
    shuffle: bool
    ragged: str

    def __post_init__(self) -> None:
        left = self.samples % self.total
        if self.samples == 0:
            raise TaskError("data() has no samples")
        if left and self.ragged == "error":
            raise ConfigError(
                f"data.ragged: {self.samples} samples are {self.samples // self.total} batches of {self.total} and "
                f"{left} left over; choose weigh or drop, or another batch.total"
            )
        if self.per_epoch == 0:
            raise ConfigError(
                f"data.ragged: drop leaves nothing: {self.samples} samples do not fill one batch of {self.total}"
            )

    @property
    def per_epoch(self) -> int:
        """Optimizer steps of one epoch."""
        return self.samples // self.total if self.ragged == "drop" else -(-self.samples // self.total)

    def permutation(self, epoch: int) -> list[int]:
        """Return the indices of all samples in the order of this epoch."""
        if not self.shuffle:
            return list(range(self.samples))
        generator = torch.Generator().manual_seed(mix_seed(self.seed, 1, epoch))
        return torch.randperm(self.samples, generator=generator).tolist()

    def batches(self, start: int) -> Iterator[tuple[int, list[int]]]:
        """Yield (epoch, indices) of each optimizer step from `start` on, without end."""
        epoch, skip = divmod(start, self.per_epoch)
        while True:
            order = self.permutation(epoch)
            for b in range(skip, self.per_epoch):
                yield epoch, order[b * self.total : (b + 1) * self.total]
            epoch, skip = epoch + 1, 0


def split_batch(batch: Sequence[int], accumulate: int, ranks: int) -> list[list[Sequence[int]]]:
    """Split a global batch into [microbatch][rank]; sizes differ by at most one, and may be zero."""
    return [_split_evenly(part, ranks) for part in _split_evenly(batch, accumulate)]


def _split_evenly(batch: Sequence[int], count: int) -> list[Sequence[int]]:
    size, more = divmod(len(batch), count)
    ends = [size * i + min(i, more) for i in range(count + 1)]
    return [batch[a:b] for a, b in pairwise(ends)]


@dataclass(frozen=True)
class MicrobatchPlan:
    """Samples of one rank for one microbatch: `keys` is never empty, `weight` may be 0."""

    keys: list[SampleKey]
    weight: float
    """Number of samples that count, divided by that of the global batch."""
