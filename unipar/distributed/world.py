"""`World`: the process group and the few collectives that the loop needs."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from unipar.distributed.place import Place
from unipar.errors import TaskError, WorldMismatch


class World:
    """Who this process is among the others, and the few collectives that the loop needs."""

    def __init__(self, place: Place, device: torch.device, store: dist.Store | None) -> None:
        self.place, self.device, self.store = place, device, store
        self.rank, self.size = place.rank, place.size
        self.closers: list[Callable[[], None]] = []
        """What a library needs done before the process group goes; the latest first."""
        self.local_closers: list[Callable[[], None]] = []
        """What a library forgets by itself, without the others; done after an error as well."""
        self._keys = 0
        self._environ: dict[str, str | None] = {}
        _current_worlds.append(self)

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def key(self, name: str) -> str:
        """A key of the store that was not used before; the same on all ranks that ask equally often."""
        self._keys += 1
        return f"{name}/{self._keys}"

    def agree(self, name: str, mine: str, sentence: Callable[[str], str]) -> None:
        """Raise a TaskError, `sentence(rank 0's)`, on a rank that says another thing than rank 0; all ranks call it."""
        if self.size == 1 or self.store is None:
            return
        key = self.key(name)
        if self.rank == 0:
            self.store.set(key, mine)
        elif (first := self.store.get(key).decode()) != mine:
            raise TaskError(sentence(first))

    def agree_so_far(self, key: str, mine: str, sentence: Callable[[int], str]) -> None:
        """Compare with the ranks that have come this far; raise a TaskError, `sentence(rank)`, if one said other.

        Nobody waits: the last rank to come sees all.
        """
        if self.size == 1 or self.store is None:
            return
        self.store.set(f"{key}/{self.rank}", mine)
        for rank in range(self.size):
            theirs = f"{key}/{rank}"
            if rank != self.rank and self.store.check([theirs]) and self.store.get(theirs).decode() != mine:
                raise TaskError(sentence(rank))

    def synchronize(self) -> None:
        """Until the device has done what it was given."""
        torch.cuda.synchronize(self.device)

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()

    def require_same_world(self, library: str, *, rank: int, size: int) -> World:
        """Itself, if the library sees the same world: left alone, several make N worlds of one."""
        if (rank, size) != (self.rank, self.size):
            raise WorldMismatch(
                f"{library} sees rank {rank} of {size}, the launcher {self.place.launcher!r} said "
                f"rank {self.rank} of {self.size}"
            )
        return self

    def set_variables(self, **variables: object) -> None:
        """Set what a library insists on in the environment, until this world is closed."""
        self.restore_variables(*variables)
        os.environ.update({name: str(value) for name, value in variables.items()})

    def restore_variables(self, *names: str) -> None:
        """Variables that a library sets by itself are as they were once this world is closed."""
        for name in names:
            self._environ.setdefault(name, os.environ.get(name))

    def close(self) -> None:
        while self.closers:
            self.closers.pop()()
        self.close_without_peers()

    def close_without_peers(self) -> None:
        """Leave without the others: they may be gone."""
        self.closers.clear()
        while self.local_closers:
            self.local_closers.pop()()
        if dist.is_initialized():
            _left_groups[:] = [*_left_groups[-1:], dist.group.WORLD]
            dist.destroy_process_group()
        _current_worlds.remove(self)
        for name, value in self._environ.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self._environ.clear()


_current_worlds: list[World] = []
"""The world that this process is in, if any."""


_left_groups: list[dist.ProcessGroup | None] = []
"""The last groups that were left. DDP's reducer would free its own while it holds the GIL, and wait for the group's
thread, which may wait for the GIL to free a tensor. From here it is freed later, and without the GIL."""


atexit.register(_left_groups.clear)


def leave_current_world() -> None:
    """After an error, in a process that goes on: leave the world that it is in."""
    for world in _current_worlds:
        world.close_without_peers()
