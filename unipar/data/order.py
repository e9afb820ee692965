"""Global order of samples, and the division of a batch among ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch

from unipar.errors import ConfigError, TaskError
from unipar.utils.seeding import mix_seed

SampleKey = tuple[int, int]
"""Key of one sample: (epoch, index)."""


class DataPosition(NamedTuple):
    """Place in the data after this many steps: the epoch, and how many of its samples were read."""

    step: int
    epoch: int
    sample: int


START = DataPosition(0, 0, 0)


@dataclass(frozen=True)
class SampleOrder:
    """Global batches of a run; they depend on the data, the seed and the batch size, not on the number of ranks."""

    samples: int
    total: int
    seed: int
    shuffle: bool
    last_batch: str
    begin: DataPosition = START
    """Place from which batches of `total` are read; before it they may have had another size."""

    draw: Callable[[int], list[int]] | None = None
    """Function that gives the indices of an epoch, if it is not drawn here."""

    def __post_init__(self) -> None:
        rest = self.samples - self.begin.sample
        left = rest % self.total
        if self.samples == 0:
            raise TaskError("data() has no samples")
        if left and self.last_batch == "error":
            raise ConfigError(
                f"data.last_batch: {'' if rest == self.samples else f'the last {rest} of '}{self.samples} samples are "
                f"{rest // self.total} batches of {self.total} and "
                f"{left} left over; choose keep or drop, or another batch.total"
            )
        if self.per_epoch == 0:
            raise ConfigError(
                f"data.last_batch: drop leaves nothing: {self.samples} samples do not fill one batch of {self.total}; "
                "choose keep, or a smaller batch.total"
            )

    @cached_property
    def per_epoch(self) -> int:
        """Optimizer steps of one epoch."""
        return self.samples // self.total if self.last_batch == "drop" else -(-self.samples // self.total)

    @cached_property
    def _first_epoch(self) -> int:
        """Optimizer steps from `begin` to the end of its epoch."""
        left = self.samples - self.begin.sample
        return left // self.total if self.last_batch == "drop" else -(-left // self.total)

    def position(self, step: int) -> DataPosition:
        """Return the place of the next step, when `step` steps are done; none before `begin` is known."""
        return DataPosition(step, *self._epoch_and_sample(step))

    def _epoch_and_sample(self, step: int) -> tuple[int, int]:
        begin, total = self.begin, self.total
        done = step - begin.step
        if done < self._first_epoch:
            return begin.epoch, begin.sample + done * total
        epochs, batches = divmod(done - self._first_epoch, self.per_epoch)
        return begin.epoch + 1 + epochs, batches * total

    def go_on_from(self, begin: DataPosition) -> SampleOrder:
        """Return the order that is read from this place on."""
        return replace(self, begin=begin)

    def place(self, step: int) -> tuple[int, int]:
        """Return the epoch and the batch within it of the next step, when `step` steps are done."""
        _, epoch, sample = self.position(step)
        return epoch, sample // self.total

    def size(self, step: int) -> int:
        """Return the samples of the next step's global batch, when `step` steps are done."""
        left = self.samples - self._epoch_and_sample(step)[1]
        return left if left < self.total else self.total

    def steps(self, epochs: int) -> int:
        """Return the number of optimizer steps of a run of this many epochs."""
        return self.begin.step + self._first_epoch + (epochs - 1 - self.begin.epoch) * self.per_epoch

    def permutation(self, epoch: int) -> list[int]:
        """Return the indices of all samples in the order of this epoch."""
        if self.draw is not None:
            return self.draw(epoch)
        return shuffled_indices(self.samples, self.seed, epoch, shuffle=self.shuffle)

    def batches(self, start: int) -> Iterator[tuple[int, list[int]]]:
        """Yield (epoch, indices) of each optimizer step from `start` on, without end."""
        _, epoch, first = self.position(start)
        least = self.total if self.last_batch == "drop" else 1
        while True:
            order = self.permutation(epoch)
            for at in range(first, self.samples - least + 1, self.total):
                yield epoch, order[at : at + self.total]
            epoch, first = epoch + 1, 0


def shuffled_indices(samples: int, seed: int, epoch: int, *, shuffle: bool) -> list[int]:
    """Return the indices of all samples in the order of an epoch; in that of the data without `shuffle`."""
    if not shuffle:
        return list(range(samples))
    generator = torch.Generator().manual_seed(mix_seed(seed, 1, epoch))
    return torch.randperm(samples, generator=generator).tolist()


def split_batch(batch: Sequence[int], accumulate: int, ranks: int) -> list[list[Sequence[int]]]:
    """Split a global batch into [microbatch][rank]; sizes differ by at most one, and may be zero."""
    return [_split_evenly(part, ranks) for part in _split_evenly(batch, accumulate)]


def _split_evenly(batch: Sequence[int], count: int) -> list[Sequence[int]]:
    size, more = divmod(len(batch), count)
    ends = [size * i + min(i, more) for i in range(count + 1)]
    return [batch[a:b] for a, b in pairwise(ends)]


@dataclass(slots=True)
class MicrobatchPlan:
    """Samples of one rank for one microbatch: `keys` is never empty, `weight` may be 0."""

    keys: list[SampleKey]
    weight: float
    """Number of samples, or tokens, that count, divided by that of the global batch."""

    tokens: int = 0
    """Tokens of the samples, if the batch is counted in tokens."""

    of_tokens: int = 0
    """Tokens of the global batch, if it is counted in tokens."""

    of_ranks: Sequence[int] = ()
    """Number of samples of each rank in this microbatch; () if each rank knows its own alone."""

    repeats: bool = False
    """Whether the order may have a sample more than once, as a sampler with replacement gives it."""
