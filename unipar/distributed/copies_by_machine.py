"""Copies of the state over machines: the ranks of a machine split one, whatever their numbers are."""

from __future__ import annotations

from typing import NamedTuple

from unipar.distributed.mesh import Mesh
from unipar.distributed.world_machines import WorldMachines, name_ranks
from unipar.errors import ConfigError
from unipar.utils.text import count_of

_KEY = "parallel.shard_over: machine"
_INSTEAD = "leave shard_over out, so that all ranks split one copy"


class RanksOfCopies(NamedTuple):
    """Ranks by pipeline stage, copy, shard of it and seat along `tensor`, in this order."""

    shape: tuple[int, int, int, int]
    ranks: tuple[int, ...]

    @property
    def copies(self) -> int:
        """Number of copies of the state."""
        return self.shape[1]

    @property
    def shards(self) -> int:
        """Number of ranks that split one copy."""
        return self.shape[2]

    @property
    def rows(self) -> list[list[int]]:
        """Ranks of each copy, where there are no stages and nothing is split over `tensor`."""
        return [list(self.ranks[at : at + self.shards]) for at in range(0, len(self.ranks), self.shards)]


def copies_by_machine(mesh: Mesh, machines: WorldMachines) -> RanksOfCopies:
    """Return the ranks of each copy, if the ranks of a machine that train the same parameters split one.

    Raise ConfigError where the machines have different numbers of them, where the ranks of a group along `tensor` or
    `context` are on several machines, and where each machine has only one rank that could split a copy.
    """
    if machines.several:
        _refuse_unequal(machines)
        _refuse_groups_across(mesh, machines)
    sizes, rows = mesh.sizes, dict[tuple[int, int, int], list[int]]()
    for rank in range(mesh.ranks):
        seat = mesh.seat_of(rank)
        rows.setdefault((seat["pipeline"], machines.index_of(rank), seat["tensor"]), []).append(rank)
    lengths = {len(row) for row in rows.values()}
    if len(lengths) > 1:
        raise ConfigError(
            f"{_KEY}: the stages of pipeline {sizes['pipeline']} begin and end in the middle of machines ({machines}): "
            "start as many ranks on each machine as whole stages need, or as divide the ranks of one"
        )
    (shards,) = lengths
    copies = sizes["data"] * sizes["context"] // shards
    if shards == 1 and copies > 1:
        raise ConfigError(
            f"{_KEY}: there is nothing to split, because each of {machines.describe_number()} has one rank that trains "
            f"on its own part of the data; {_INSTEAD}, or say parallel.shard: nothing"
        )
    ranks: list[int] = []
    for stage in range(sizes["pipeline"]):
        of_stage = [
            [rows[stage, machine, seat] for seat in range(sizes["tensor"])]
            for machine in range(len(machines.all))
            if (stage, machine, 0) in rows
        ]
        ranks += [seats[seat][place] for seats in of_stage for place in range(shards) for seat in range(len(seats))]
    return RanksOfCopies((sizes["pipeline"], copies, shards, sizes["tensor"]), tuple(ranks))


def _refuse_unequal(machines: WorldMachines) -> None:
    if len({len(machine.ranks) for machine in machines.all}) > 1:
        have = ", ".join(f"{machine} has {count_of(len(machine.ranks), 'rank')}" for machine in machines.all)
        raise ConfigError(
            f"{_KEY}: {have}, and copies can be split only over equal numbers: start as many ranks on each machine, or "
            f"{_INSTEAD}"
        )


def _refuse_groups_across(mesh: Mesh, machines: WorldMachines) -> None:
    """Raise ConfigError if the ranks that split a block or a sequence together are on several machines."""
    for axis in ("tensor", "context"):
        size = mesh.sizes[axis]
        for rank in range(mesh.ranks if size > 1 else 0):
            group = mesh.line(rank, (axis,))
            if len({machines.index_of(other) for other in group}) > 1:
                where = " and ".join(dict.fromkeys(str(machines.of(other)) for other in group))
                raise ConfigError(
                    f"{_KEY} wants the ranks of each {axis} group on one machine, and {name_ranks(group)} are on "
                    f"{where}: start the ranks of a machine one after another (block placement), a multiple of "
                    f"{axis} {size} on each"
                )
