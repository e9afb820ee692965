"""`CopyCheck`: whether ranks that should hold the same values of a weight do."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, final

import torch
import torch.distributed as dist
from torch import Tensor

from unipar.backend import Piece
from unipar.distributed.world import World
from unipar.training.watch.digests import digest_tensor

_NOT_HERE = -(1 << 62)
"""Entry of a weight that this rank does not hold; digests are not negative."""


class UnequalCopy(NamedTuple):
    """A weight of which this rank has other values than another rank that holds the same region."""

    name: str
    of: int
    """The other rank."""


@final
class CopyCheck:
    """Check of the regions of weights that several ranks hold; all ranks call it together.

    Who holds what is asked once. After that a check takes one reduction of two numbers for each shared region.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._shared: list[int] | None = None

    def find_unequal(
        self, weights: Iterable[Piece], digest: Callable[[Tensor], int] = digest_tensor
    ) -> list[UnequalCopy]:
        """Return the weights of which this rank's values are not those of the lowest rank that holds them too."""
        mine = {_key(piece): piece for piece in weights if piece.tensor.numel()}
        if self._shared is None:
            self._shared = self._find_shared(list(mine))
        if not self._shared:
            return []
        digests = {key: digest(mine[key].tensor) for key in self._shared if key in mine}
        table = [(digests[key], -digests[key]) if key in digests else (_NOT_HERE, _NOT_HERE) for key in self._shared]
        largest = self._largest(table)
        unequal = [key for key, (high, low) in zip(self._shared, largest.tolist(), strict=True) if high != -low]
        if not unequal:
            return []
        return self._blame(unequal, mine, digests)

    def _largest(self, table: Any) -> Tensor:
        values = torch.tensor(table, dtype=torch.int64, device=self._world.device)
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return values

    def _find_shared(self, keys: list[int]) -> list[int]:
        """Return the keys of regions that more than one rank holds, in one order on all ranks."""
        if self._world.size == 1:
            return []
        keys_of_ranks: list[list[int]] = [[] for _ in range(self._world.size)]
        dist.all_gather_object(keys_of_ranks, sorted(keys))
        held = Counter(key for row in keys_of_ranks for key in row)
        return sorted(key for key, ranks in held.items() if ranks > 1)

    def _blame(self, unequal: list[int], mine: dict[int, Piece], digests: dict[int, int]) -> list[UnequalCopy]:
        """Return the unequal weights whose value on this rank is not that of most ranks, or of the lowest one."""
        digests_of_ranks: list[list[int | None]] = [[] for _ in range(self._world.size)]
        dist.all_gather_object(digests_of_ranks, [digests.get(key) for key in unequal])
        blamed: list[UnequalCopy] = []
        for key, *values in zip(unequal, *digests_of_ranks, strict=True):
            counts = Counter(value for value in values if value is not None)
            right = max(counts, key=lambda value: (counts[value], -values.index(value)))
            if key in mine and digests[key] != right:
                blamed.append(UnequalCopy(mine[key].name, values.index(right)))
        return blamed


def _key(piece: Piece) -> int:
    """Return a number of 62 bits for a region of a weight."""
    text = f"{piece.name} {tuple(piece.where)} {tuple(piece.shape)}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 2
