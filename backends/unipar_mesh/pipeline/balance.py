"""Cut of a model's blocks into stages that take about equally long, and need about equally much memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import pairwise

from unipar.errors import TaskError

_SLOWER_BY = 1.05
"""Factor by which the slowest stage may be slower than in the fastest cut, if that saves memory."""


def balanced_cuts(
    stages: int,
    seconds: Sequence[float],
    numbers: Sequence[int],
    *,
    last_seconds: float,
    last_numbers: int,
    places: Collection[int] | None = None,
) -> list[int]:
    """Return the number of the block with which each stage begins, and the number of all blocks.

    `seconds` and `numbers` are time and parameters of each block; the last stage has what follows the blocks as well.
    `places`: the blocks with which a stage may begin, at least one for each stage but the first; None: all.
    """
    if stages == 1:
        return [0, len(seconds)]

    def slowness(first: int, end: int) -> float:
        if places is not None and not {first, end} <= {0, *places, len(seconds)}:
            return float("inf")
        return sum(seconds[first:end]) + (last_seconds if end == len(seconds) else 0.0)

    def size(first: int, end: int) -> float:
        return sum(numbers[first:end]) + (last_numbers if end == len(numbers) else 0)

    limit = _SLOWER_BY * _worst(_best_cuts(stages, len(seconds), slowness), slowness)
    return _best_cuts(stages, len(seconds), lambda i, j: size(i, j) if slowness(i, j) <= limit else float("inf"))


def _worst(cuts: Sequence[int], cost: Callable[[int, int], float]) -> float:
    return max(cost(i, j) for i, j in pairwise(cuts))


def _best_cuts(stages: int, blocks: int, cost: Callable[[int, int], float]) -> list[int]:
    """Return the cuts whose most expensive stage is cheapest; among equal ones, the earlier stages are the larger."""
    best: dict[int, tuple[float, list[int]]] = {end: (cost(0, end), [0, end]) for end in range(1, blocks + 1)}
    for stage in range(2, stages + 1):
        longer: dict[int, tuple[float, list[int]]] = {}
        for end in range(stage, blocks + 1):
            ways = [
                (max(best[first][0], cost(first, end)), -first, [*best[first][1], end])
                for first in range(stage - 1, end)
            ]
            worst, _, cuts = min(ways)
            longer[end] = worst, cuts
        best = longer
    return best[blocks][1]


def cuts_at(names: Sequence[str], blocks: Sequence[str], stages: int) -> list[int]:
    """Return the cuts that a task names: the block with which each stage but the first begins."""
    block_names = list(names)
    for name in block_names:
        if name not in blocks:
            raise TaskError(
                f"cuts({stages}) names {name!r}, which is no block of the model: {', '.join(blocks[:8])}"
                f"{', ...' if len(blocks) > 8 else ''}"
            )
    places = [blocks.index(name) for name in block_names]
    if len(places) != stages - 1 or sorted({0, *places}) != [0, *places]:
        raise TaskError(
            f"cuts({stages}) returned {block_names}; it must return {stages - 1} blocks in their order, with which the "
            "second and each further stage begins"
        )
    return [0, *places, len(blocks)]
