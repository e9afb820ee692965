"""`Neighbours`: with whom the ranks of a machine are linked, in a tree over all machines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Self, final

from unipar.distributed.world_machines import WorldMachine, WorldMachines

FAN_OUT: Final = 16
"""Largest number of machines whose first ranks are linked to that of one other machine."""


@final
@dataclass(frozen=True)
class Neighbours:
    """Machine of a rank, the one above it on the way to rank 0, and those below it.

    The first rank of each machine is linked to that of another machine, at most FAN_OUT to one, and the other ranks of
    a machine to its first.
    """

    here: WorldMachine
    above: WorldMachine | None
    """Machine to whose first rank that of this one is linked; None for rank 0's."""

    below: tuple[int, ...]
    """First ranks of the machines below."""

    depth: int
    """Number of machines above."""

    @classmethod
    def of_machine(cls, machines: WorldMachines, index: int) -> Self:
        """Return the neighbours of the machine at this position."""
        depth, at = 0, index
        while at:
            depth, at = depth + 1, (at - 1) // FAN_OUT
        above = machines.all[(index - 1) // FAN_OUT] if index else None
        first = index * FAN_OUT + 1
        below = tuple(machine.ranks[0] for machine in machines.all[first : first + FAN_OUT])
        return cls(machines.all[index], above, below, depth)

    @classmethod
    def from_json(cls, row: Sequence[Any]) -> Self:
        """Return the neighbours that `to_json` gave."""
        near, below, depth = row
        here, *above = WorldMachines.from_json(near).all
        return cls(here, above[0] if above else None, tuple(below), depth)

    def to_json(self) -> list[Any]:
        """Return a row of plain values."""
        near = (self.here,) if self.above is None else (self.here, self.above)
        return [WorldMachines(near).to_json(), list(self.below), self.depth]

    def rank_above(self, rank: int) -> int | None:
        """Return the rank to which one of this machine is linked on the way to rank 0; None for rank 0 itself."""
        if rank != self.here.ranks[0]:
            return self.here.ranks[0]
        return None if self.above is None else self.above.ranks[0]

    def ranks_below(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that are linked to one of this machine, away from rank 0."""
        return (*self.here.ranks[1:], *self.below) if rank == self.here.ranks[0] else ()

    def machine_above(self, rank: int) -> WorldMachine:
        """Return the machine of the rank above one of this machine."""
        return self.above if self.above is not None and rank == self.here.ranks[0] else self.here
