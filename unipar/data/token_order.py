"""Global batches of a budget of tokens, in the order of each epoch."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from copy import copy
from typing import final

from unipar.config import BatchSizes
from unipar.data.lengths import SampleLengths
from unipar.data.order import START, DataPosition, shuffled_indices
from unipar.data.sampler_order import SamplerOrder
from unipar.data.token_split import divide_by_tokens, find_batch_ends
from unipar.errors import ConfigError, TaskError

_KEPT_EPOCHS = 4
"""Epochs whose batches are remembered."""


@final
class TokenOrder:
    """Global batches of a run: as many samples, in the order of the epoch, as the budget holds.

    They depend on the data, the seed and the budget, not on the number of ranks.
    """

    def __init__(
        self,
        lengths: SampleLengths,
        tokens: int,
        seed: int,
        *,
        shuffle: bool,
        last_batch: str,
        begin: DataPosition = START,
        sampler: SamplerOrder | None = None,
    ) -> None:
        """`sampler`: order of a sampler of the user's; None: it is drawn here."""
        self.lengths, self.tokens, self.seed, self.shuffle, self.last_batch = lengths, tokens, seed, shuffle, last_batch
        self.given, self.samples = sampler, len(lengths.of) if sampler is None else sampler.count
        """Number of samples of an epoch."""

        self.begin = begin
        """Place from which batches of this budget are read; before it they may have had another size."""

        self._longest = lengths.longest if lengths.of else 0
        self._ends: dict[tuple[int, int], list[int]] = {}
        self._counts: dict[int, int] = {}
        """Number of batches of each whole epoch that was asked for."""

        if not lengths.of:
            raise TaskError("data() has no samples")
        if last_batch == "error":
            raise ConfigError(
                f"data.last_batch: error: batches of at most {tokens} tokens (batch.tokens) are rarely full; choose "
                "keep or drop"
            )
        if self._count(0) == 0:
            raise ConfigError(
                f"data.last_batch: drop leaves nothing: {len(lengths.of)} samples have {sum(lengths.of)} tokens, and "
                f"do not fill one batch of {tokens} (batch.tokens)"
            )

    def go_on_from(self, begin: DataPosition) -> TokenOrder:
        """Return the order that is read from this place on."""
        moved = copy(self)
        moved.begin = begin
        return moved

    @property
    def per_epoch(self) -> int:
        """Optimizer steps of the first epoch; another may have more or fewer."""
        return self._count(0)

    def permutation(self, epoch: int) -> list[int]:
        """Return the indices of all samples in the order of this epoch."""
        if self.given is not None:
            return self.given(epoch)
        return shuffled_indices(self.samples, self.seed, epoch, shuffle=self.shuffle)

    def position(self, step: int) -> DataPosition:
        """Return the place of the next step, when `step` steps are done; none before `begin` is known."""
        done, epoch, first = step - self.begin.step, self.begin.epoch, self.begin.sample
        if done < len(ends := self._batch_ends(epoch, first)):
            return DataPosition(step, epoch, ends[done - 1] if done else first)
        done, epoch = done - len(ends), epoch + 1
        while done >= (count := self._count(epoch)):
            done, epoch = done - count, epoch + 1
        return DataPosition(step, epoch, self._batch_ends(epoch, 0)[done - 1] if done else 0)

    def place(self, step: int) -> tuple[int, int]:
        """Return the epoch and the batch within it of the next step, when `step` steps are done."""
        _, epoch, sample = self.position(step)
        return epoch, bisect_right(self._batch_ends(epoch, 0), sample)

    def steps(self, epochs: int) -> int:
        """Return the number of optimizer steps of a run of this many epochs."""
        rest = len(self._batch_ends(self.begin.epoch, self.begin.sample))
        return self.begin.step + rest + sum(self._count(epoch) for epoch in range(self.begin.epoch + 1, epochs))

    def size(self, step: int) -> int:
        """Return the samples of the next step's global batch, when `step` steps are done."""
        _, epoch, sample = self.position(step)
        ends = self._batch_ends(epoch, self.begin.sample if epoch == self.begin.epoch else 0)
        return ends[bisect_right(ends, sample)] - sample

    def batches(self, start: int) -> Iterator[tuple[int, list[int]]]:
        """Yield (epoch, indices) of each optimizer step from `start` on, without end."""
        _, epoch, first = self.position(start)
        while True:
            order = self.permutation(epoch)
            for end in self._batch_ends(epoch, first):
                yield epoch, order[first:end]
                first = end
            epoch, first = epoch + 1, 0

    def _count(self, epoch: int) -> int:
        if epoch not in self._counts:
            self._counts[epoch] = len(self._batch_ends(epoch, 0))
        return self._counts[epoch]

    def _batch_ends(self, epoch: int, first: int) -> list[int]:
        """Return where in the epoch's order each batch ends, if they are read from sample `first` on."""
        if (epoch, first) not in self._ends:
            while len(self._ends) >= _KEPT_EPOCHS:
                self._ends.pop(next(iter(self._ends)))
            self._ends[epoch, first] = self._find_ends(self.permutation(epoch)[first:], first)
        return self._ends[epoch, first]

    def _find_ends(self, order: Sequence[int], first: int) -> list[int]:
        lengths = [self.lengths.of[i] for i in order]
        longest = self._longest if self.last_batch == "drop" else None
        return [first + end for end in find_batch_ends(lengths, self.tokens, longest)]


def split_by_tokens(batch: Sequence[int], lengths: Sequence[int], sizes: BatchSizes) -> list[list[list[int]]]:
    """Split a global batch into [microbatch][rank], the longest samples first; the last ones may be empty."""
    limits = sizes.tokens
    assert limits is not None
    return divide_by_tokens(
        batch, lengths, sizes.ranks, micro=limits.micro, accumulate=limits.accumulate, packed=limits.packed
    )


def consecutive_microbatches(lengths: Sequence[int], most: int, *, packed: bool) -> Iterator[range]:
    """Yield the samples of microbatches of at most this many tokens, in the order of the data."""
    first, longest, total = 0, 0, 0
    for i, length in enumerate(lengths):
        longest, total = max(longest, length), total + length
        if i > first and (total if packed else longest * (i + 1 - first)) > most:
            yield range(first, i)
            first, longest, total = i, length, length
    if first < len(lengths):
        yield range(first, len(lengths))
