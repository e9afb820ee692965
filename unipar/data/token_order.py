"""Global batches of a budget of tokens, and their division into microbatches of like lengths."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from itertools import accumulate
from typing import final

from unipar.config import BatchSizes
from unipar.data.lengths import SampleLengths
from unipar.data.order import START, DataPosition, shuffled_indices
from unipar.data.sampler_order import SamplerOrder
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
        ragged: str,
        begin: DataPosition = START,
        given: SamplerOrder | None = None,
    ) -> None:
        """`given`: order of a sampler of the user's; None: it is drawn here."""
        self.lengths, self.tokens, self.seed, self.shuffle, self.ragged = lengths, tokens, seed, shuffle, ragged
        self.given, self.samples = given, len(lengths.of) if given is None else given.count
        """Number of samples of an epoch."""

        self.begin = begin
        """Place from which batches of this budget are read; before it they may have had another size."""

        self._longest = lengths.longest if lengths.of else 0
        self._ends: dict[tuple[int, int], list[int]] = {}
        self._counts: dict[int, int] = {}
        """Number of batches of each whole epoch that was asked for."""

        if not lengths.of:
            raise TaskError("data() has no samples")
        if ragged == "error":
            raise ConfigError(
                f"data.ragged: error: batches of at most {tokens} tokens (batch.tokens) are rarely full; choose weigh "
                "or drop"
            )
        if self._count(0) == 0:
            raise ConfigError(
                f"data.ragged: drop leaves nothing: {len(lengths.of)} samples have {sum(lengths.of)} tokens, and do "
                f"not fill one batch of {tokens} (batch.tokens)"
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
        """Return the number of optimizer steps of a run of so many epochs."""
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
        sums = [0, *accumulate(self.lengths.of[i] for i in order)]
        ends: list[int] = []
        at = 0
        while at < len(order):
            end = bisect_right(sums, sums[at] + self.tokens, at) - 1
            if end == len(order) and self.ragged == "drop" and sums[end] - sums[at] + self._longest <= self.tokens:
                break  # another sample of any length would have fitted
            ends.append(first + end)
            at = end
        return ends


def split_by_tokens(batch: Sequence[int], lengths: Sequence[int], sizes: BatchSizes) -> list[list[list[int]]]:
    """Split a global batch into [microbatch][rank], the longest samples first; the last ones may be empty.

    Every rank has as many microbatches, and those that ranks work on at the same time have samples of like lengths.
    """
    limits = sizes.tokens
    assert limits is not None
    ordered = sorted(batch, key=lambda i: -lengths[i])  # stable, so the same on every rank
    divide = _pack if limits.packed else _cut
    if limits.micro is None:
        assert limits.accumulate is not None
        count = limits.accumulate * sizes.ranks
    else:
        count = _round_up(len(divide(ordered, lengths, limits.micro, None)), sizes.ranks)
    parts = divide(ordered, lengths, limits.micro, count)
    parts = _split_further(parts, lengths, count, packed=limits.packed)
    parts += [[] for _ in range(count - len(parts))]
    return [parts[i : i + sizes.ranks] for i in range(0, count, sizes.ranks)]


def padded_tokens(part: Sequence[int], lengths: Sequence[int], *, packed: bool) -> int:
    """Return the tokens of a microbatch as `batch.micro` counts them."""
    return sum(lengths[i] for i in part) if packed else len(part) * max((lengths[i] for i in part), default=0)


def consecutive_microbatches(lengths: Sequence[int], most: int, *, packed: bool) -> Iterator[range]:
    """Yield the samples of microbatches of at most so many tokens, in the order of the data."""
    first, longest, total = 0, 0, 0
    for i, length in enumerate(lengths):
        longest, total = max(longest, length), total + length
        if i > first and (total if packed else longest * (i + 1 - first)) > most:
            yield range(first, i)
            first, longest, total = i, length, length
    if first < len(lengths):
        yield range(first, len(lengths))


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step


_Parts = list[list[int]]


def _cut(ordered: Sequence[int], lengths: Sequence[int], most: int | None, count: int | None) -> _Parts:
    """Return the samples, which are sorted, in runs of at most so many padded tokens, and as even as `count` allows."""
    if count is not None:
        least, enough = lengths[ordered[0]], most or lengths[ordered[0]] * -(-len(ordered) // count)
        most = _least_that(lambda limit: len(_cut_at(ordered, lengths, limit)) <= count, least, enough)
    assert most is not None
    return _cut_at(ordered, lengths, most)


def _cut_at(ordered: Sequence[int], lengths: Sequence[int], most: int) -> _Parts:
    parts: _Parts = []
    at = 0
    while at < len(ordered):
        end = at + max(1, most // lengths[ordered[at]])
        parts.append(list(ordered[at:end]))
        at = end
    return parts


def _least_that(fits: Callable[[int], bool], least: int, enough: int) -> int:
    """Return the smallest number for which `fits` is true, which it is for `enough` and every larger one."""
    while least < enough:
        middle = (least + enough) // 2
        if fits(middle):
            enough = middle
        else:
            least = middle + 1
    return least


def _pack(ordered: Sequence[int], lengths: Sequence[int], most: int | None, count: int | None) -> _Parts:
    """Return the samples, which are sorted, in parts of at most so many tokens, and as even as `count` allows."""
    if count is not None:
        even = _spread(ordered, lengths, count)
        if most is None or max(padded_tokens(part, lengths, packed=True) for part in even) <= most:
            return even
    assert most is not None
    parts: _Parts = []
    left: list[int] = []
    for i in ordered:  # each into the first part that has room for it
        at = next((at for at, room in enumerate(left) if room >= lengths[i]), len(parts))
        if at == len(parts):
            parts.append([])
            left.append(most)
        parts[at].append(i)
        left[at] -= lengths[i]
    return parts


def _spread(ordered: Sequence[int], lengths: Sequence[int], count: int) -> _Parts:
    """Return so many parts, each sample put into the one that has the fewest tokens so far."""
    parts: _Parts = [[] for _ in range(count)]
    heap = [(0, at) for at in range(count)]
    for i in ordered:
        tokens, at = heap[0]
        parts[at].append(i)
        heapq.heapreplace(heap, (tokens + lengths[i], at))
    return [part for part in parts if part]


def _split_further(parts: _Parts, lengths: Sequence[int], count: int, *, packed: bool) -> _Parts:
    """Return so many parts, the largest ones halved; fewer if each has one sample. The largest come first."""
    heap = [(-padded_tokens(part, lengths, packed=packed), at, part) for at, part in enumerate(parts)]
    heapq.heapify(heap)
    single: list[tuple[int, int, list[int]]] = []
    number = len(parts)
    while heap and len(heap) + len(single) < count:
        entry = heapq.heappop(heap)
        part = entry[2]
        if len(part) == 1:
            single.append(entry)
            continue
        for half in (part[: len(part) // 2], part[len(part) // 2 :]):
            heapq.heappush(heap, (-padded_tokens(half, lengths, packed=packed), number, half))
            number += 1
    found = heap + single
    if not packed:  # ranks that work at the same time get samples of like lengths
        return [part for _, _, part in sorted(found, key=lambda entry: (-lengths[entry[2][0]], entry[0], entry[1]))]
    return [part for _, _, part in sorted(found)]
