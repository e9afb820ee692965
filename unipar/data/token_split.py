"""Batches of a budget of tokens: where each ends, and its cut into microbatches of samples of like lengths."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate as running_sums


def find_batch_ends(lengths: Sequence[int], tokens: int, longest: int | None = None) -> list[int]:
    """Return where each batch of at most this many tokens ends, of samples with these lengths, in their order.

    `longest`: length of the longest sample; the last batch is left out if that would have fitted, too. None: it stays.
    """
    sums = [0, *running_sums(lengths)]
    ends: list[int] = []
    at = 0
    while at < len(lengths):
        end = bisect_right(sums, sums[at] + tokens, at) - 1
        if end == len(lengths) and longest is not None and sums[end] - sums[at] + longest <= tokens:
            break
        ends.append(end)
        at = end
    return ends


def divide_by_tokens(
    batch: Sequence[int],
    lengths: Sequence[int],
    ranks: int,
    *,
    micro: int | None,
    accumulate: int | None,
    packed: bool,
) -> list[list[list[int]]]:
    """Split a global batch into [microbatch][rank], the longest samples first; the last ones may be empty.

    Every rank has as many microbatches, and those that ranks work on at the same time have samples of like lengths.
    `micro`: tokens of a microbatch at most, with padding unless `packed`; None: `accumulate` microbatches a rank.
    """
    ordered = sorted(batch, key=lambda i: -lengths[i])  # stable, so the same on every rank
    divide = _pack if packed else _cut
    if micro is None:
        assert accumulate is not None
        count = accumulate * ranks
    else:
        count = -(-len(divide(ordered, lengths, micro, None)) // ranks) * ranks  # as many on each rank
    parts = divide(ordered, lengths, micro, count)
    parts = _split_further(parts, lengths, count, packed=packed)
    parts += [[] for _ in range(count - len(parts))]
    return [parts[i : i + ranks] for i in range(0, count, ranks)]


def padded_tokens(part: Sequence[int], lengths: Sequence[int], *, packed: bool) -> int:
    """Return the tokens of a microbatch as `batch.micro` counts them."""
    return sum(lengths[i] for i in part) if packed else len(part) * max((lengths[i] for i in part), default=0)


_Parts = list[list[int]]


def _cut(ordered: Sequence[int], lengths: Sequence[int], most: int | None, count: int | None) -> _Parts:
    """Return the sorted samples in runs of at most this many padded tokens, and as even as `count` allows."""
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
    """Return the samples, which are sorted, in parts of at most this many tokens, and as even as `count` allows."""
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
    """Return this many parts, each sample put into the one that has the fewest tokens so far."""
    parts: _Parts = [[] for _ in range(count)]
    heap = [(0, at) for at in range(count)]
    for i in ordered:
        tokens, at = heap[0]
        parts[at].append(i)
        heapq.heapreplace(heap, (tokens + lengths[i], at))
    return [part for part in parts if part]


def _split_further(parts: _Parts, lengths: Sequence[int], count: int, *, packed: bool) -> _Parts:
    """Return this many parts, the largest ones halved; fewer if each has one sample. The largest come first."""
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
    all_parts = heap + single
    if not packed:  # ranks that work at the same time get samples of like lengths
        return [part for _, _, part in sorted(all_parts, key=lambda entry: (-lengths[entry[2][0]], entry[0], entry[1]))]
    return [part for _, _, part in sorted(all_parts)]
