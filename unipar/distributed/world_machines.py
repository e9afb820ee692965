"""`WorldMachines`: on which machine each rank of a world is, and where that machine can be reached."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

from typing_extensions import override

from unipar.utils.procfs import boot_id
from unipar.utils.text import count_of


def machine_key() -> str:
    """Return a text that is the same for all processes that see one process table under one host name."""
    here = f"{boot_id()} {os.readlink('/proc/self/ns/pid')} {socket.gethostname()}"
    return hashlib.sha256(here.encode()).hexdigest()[:12]


@dataclass(frozen=True)
class WorldMachine:
    """A machine of a world."""

    name: str
    """Its host name; another machine may have the same one."""

    address: str
    """Numeric address at which the other machines reach it."""

    ranks: tuple[int, ...]
    """Ranks on it, ascending."""

    @override
    def __str__(self) -> str:
        return f"{self.name} ({self.address})" if self.address else self.name


@dataclass(frozen=True)
class WorldMachines:
    """Machines of a world, that of rank 0 first, then by their first ranks."""

    all: tuple[WorldMachine, ...]

    @classmethod
    def one(cls, size: int) -> Self:
        """Return the machines of a world whose ranks are all on this machine."""
        return cls((WorldMachine(socket.gethostname(), "", tuple(range(size))),))

    @classmethod
    def filled(cls, size: int, per: int) -> Self:
        """Return the machines of a planned world, with this many ranks each, one machine filled after another."""
        firsts = enumerate(range(0, size, per), 1)
        return cls(tuple(WorldMachine(f"machine {n}", "", tuple(range(at, min(at + per, size)))) for n, at in firsts))

    @classmethod
    def of_ranks(cls, keys: Sequence[str], names: Sequence[str], addresses: Sequence[str]) -> Self:
        """Return the machines of a world from each rank's machine key, host name and address."""
        ranks: dict[str, list[int]] = {}
        for rank, key in enumerate(keys):
            ranks.setdefault(key, []).append(rank)
        return cls(tuple(WorldMachine(names[on[0]], addresses[on[0]], tuple(on)) for on in ranks.values()))

    @classmethod
    def from_json(cls, rows: Iterable[Sequence[Any]]) -> Self:
        """Return the machines that `to_json` gave."""
        return cls(tuple(WorldMachine(name, address, _ranks_of_runs(runs)) for name, address, runs in rows))

    def to_json(self) -> list[list[Any]]:
        """Return rows of plain values; ranks at equal distances are three numbers."""
        return [[machine.name, machine.address, _runs_of_ranks(machine.ranks)] for machine in self.all]

    @property
    def several(self) -> bool:
        """Whether there is more than one machine."""
        return len(self.all) > 1

    @cached_property
    def _index_by_rank(self) -> dict[int, int]:
        return {rank: index for index, machine in enumerate(self.all) for rank in machine.ranks}

    def index_of(self, rank: int) -> int:
        """Return the position of a rank's machine among all."""
        return self._index_by_rank[rank]

    def of(self, rank: int) -> WorldMachine:
        """Return the machine that a rank is on."""
        return self.all[self._index_by_rank[rank]]

    def between(self, ranks: Iterable[int]) -> bool:
        """Return whether these ranks are on several machines."""
        return len({self._index_by_rank[rank] for rank in ranks}) > 1

    def leads(self, rank: int) -> bool:
        """Return whether a rank is the first one on its machine."""
        return self.of(rank).ranks[0] == rank

    def local_rank(self, rank: int) -> int:
        """Return the position of a rank among those of its machine."""
        return self.of(rank).ranks.index(rank)

    @override
    def __str__(self) -> str:
        """Return which ranks are where: `node1 (10.0.0.1): ranks 0 and 1; node2 (10.0.0.2): rank 2`."""
        return "; ".join(f"{machine}: {name_ranks(machine.ranks)}" for machine in self.all)

    def describe_number(self) -> str:
        """Return the number of machines in words: `2 machines`."""
        return count_of(len(self.all), "machine")


def _runs_of_ranks(ranks: Sequence[int]) -> list[int]:
    """Return distance, first and number of ranks; a 0 and the ranks themselves if their distances differ."""
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    if list(ranks) == list(range(ranks[0], ranks[0] + step * len(ranks), step)):
        return [step, ranks[0], len(ranks)]
    return [0, *ranks]


def _ranks_of_runs(runs: Sequence[int]) -> tuple[int, ...]:
    step, *rest = runs
    return tuple(range(rest[0], rest[0] + step * rest[1], step)) if step else tuple(rest)


def name_ranks(ranks: Sequence[int]) -> str:
    """Return ranks in words: `rank 3`, `ranks 0 to 3`, `ranks 0, 2 and 5`; of more than eight, the first few."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    if len(ranks) > 8:
        return f"ranks {', '.join(map(str, ranks[:6]))} and {len(ranks) - 6} more"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
