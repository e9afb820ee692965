"""`World`: process group of a run, and the few collectives that the training loop needs."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from unipar.distributed.device import synchronize
from unipar.distributed.mesh import Mesh, MeshGroups
from unipar.distributed.place import LARGE_WORLD, Place
from unipar.distributed.world_machines import WorldMachines
from unipar.errors import TaskError, WorldMismatch

_Value = TypeVar("_Value")


class Tree(Protocol):
    """Links between ranks on several machines, over which all give to rank 0 and learn from it."""

    def decide(
        self,
        name: str,
        mine: str,
        judge: Callable[[list[str]], str],
        patience: float = ...,
        waiting: Callable[[], None] | None = None,
    ) -> str:
        """Return what `judge` on rank 0 makes of the texts of all ranks."""
        ...

    def tell(self, name: str, text: str | None, patience: float = ...) -> str:
        """Return rank 0's text on all ranks."""
        ...

    def tell_machine(self, name: str, text: str | None, patience: float = ...) -> str:
        """Return the text of a machine's first rank on all of its ranks."""
        ...


class World:
    """Rank of this process in its process group, and the few collectives that the training loop needs."""

    def __init__(self, place: Place, device: torch.device, store: dist.Store | None) -> None:
        self.place, self.device, self.store = place, device, store
        self.rank, self.size = place.rank, place.size
        self.data_rank, self.data_size = self.rank, self.size
        """Part of each global batch that this rank trains on, from 0, and their number; ranks may share a part."""

        self.leads = True
        """Whether this rank counts, among those that train on the same part: on one of them it is true."""

        self.mesh = Mesh.of(self.rank, self.size)
        """Axes of the ranks, and this rank's seat along each; `lay` changes it."""

        self._groups: dict[tuple[int, ...], MeshGroups] = {}
        self._host_group: Any = None
        self.closers: list[Callable[[], None]] = []
        """Functions to call before the process group is destroyed, on all ranks together; the latest first."""

        self.local_closers: list[Callable[[], None]] = []
        """Functions that reset a library's state without the other ranks; called after an error as well."""

        self.machines = WorldMachines.one(self.size)
        """On which machine each rank is."""

        self.tree: Tree | None = None
        """Links between the machines; None if there is but one."""

        self.launch = ""
        """Prefix of this world's names in what it shares with later ones: of keys in a store, of rounds in the tree."""

        self.owns_group = True
        """Whether the process group ends with this world; one that was alive before it stays alive."""

        self.barrier_devices: list[int] | None = None
        """Index of this rank's device if the process group was not told, and would guess it in a barrier."""

        self._keys = 0
        self._environ: dict[str, str | None] = {}
        _current_worlds.append(self)

    @property
    def local_rank_for_libraries(self) -> int:
        """Value of LOCAL_RANK for libraries that take it as the index of their GPU: ranks may share one GPU."""
        return self.device.index if self.device.type not in ("cpu", "mps") else self.place.local_rank

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the tensor, summed over all ranks in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def lay(self, *, tensor: int = 1, pipeline: int = 1, context: int = 1, expert: int = 1) -> None:
        """Give this rank its seat in a mesh with axes of these sizes; the data has the ranks that are left.

        Jobs of one world may lay other meshes one after another; groups of the same mesh are made once.
        """
        self.mesh = Mesh.of(self.rank, self.size, tensor=tensor, pipeline=pipeline, context=context, expert=expert)
        self.data_rank, self.data_size = self.mesh.seat["data"], self.mesh.sizes["data"]
        self.leads = self.mesh.leads

    @property
    def groups(self) -> MeshGroups:
        """Process groups along the axes of the mesh; its members are made by all ranks together."""
        key = (*self.mesh.sizes.values(), self.mesh.expert)
        if key not in self._groups:
            self._groups[key] = MeshGroups(self.mesh, self.device.type)
        return self._groups[key]

    def sum_over_data(self, tensor: Tensor) -> Tensor:
        """Return the tensor, summed in place over the parts of the batch: ranks that have the same part count once."""
        return self.sum(tensor if self.leads else tensor.zero_())

    def sum_over_data_on_host(self, tensor: Tensor) -> Tensor:
        """Return a tensor in host memory, summed as `sum_over_data` does; no rank waits for its device."""
        if self.device.type == "cpu" or self.size == 1:
            return self.sum_over_data(tensor)
        if self._host_group is None:
            self._host_group = dist.new_group(backend="gloo")
        dist.all_reduce(tensor if self.leads else tensor.zero_(), group=self._host_group)
        return tensor

    def gather_objects(self, mine: Any, root: int) -> list[Any]:
        """Return each rank's object on rank `root`, and nothing on the others; all ranks call this."""
        if self.size == 1:
            return [mine]
        ranks: list[Any] | None = [None] * self.size if self.rank == root else None
        dist.gather_object(mine, ranks, dst=root)
        return ranks or []

    def tell_objects(self, value: _Value, root: int) -> _Value:
        """Return the object of rank `root`; all ranks call this."""
        if self.size == 1:
            return value
        values: list[Any] = [value]
        dist.broadcast_object_list(values, root)
        return values[0]

    def key(self, name: str) -> str:
        """Return a new key of the store; ranks that have called this equally often get the same key."""
        self._keys += 1
        return f"{name}/{self._keys}"

    def agree(self, name: str, mine: str, sentence: Callable[[str], str]) -> None:
        """Raise TaskError on a rank whose text differs from rank 0's; all ranks call this.

        The message is `sentence(text of rank 0)`.
        """
        if self.size == 1 or self.store is None:
            return
        key = self.key(name)
        if self.tree is not None:
            patience = self.store.timeout.total_seconds()  # pyright: ignore[reportAttributeAccessIssue] - not in stubs
            first = self.tree.tell(f"{self.launch}/{key}", None if self.rank else mine, patience)
        elif self.rank == 0:
            self.store.set(key, first := mine)
        else:
            first = self.store.get(key).decode()
        if first != mine:
            raise TaskError(sentence(first))

    def agree_so_far(self, key: str, mine: str, sentence: Callable[[int], str]) -> None:
        """Raise TaskError if the text of a rank that has already made this call differs; no rank waits.

        The last rank to call sees all texts. The message is `sentence(rank)`, with the rank that differs. In a world of
        more than LARGE_WORLD ranks each looks at rank 0 and its two neighbours only: a difference is between some two.
        """
        if self.size == 1 or self.store is None:
            return
        self.store.set(f"{key}/{self.rank}", mine)
        near = sorted({0, max(0, self.rank - 1), min(self.rank + 1, self.size - 1)})
        for rank in range(self.size) if self.size <= LARGE_WORLD else near:
            theirs = f"{key}/{rank}"
            if rank != self.rank and self.store.check([theirs]) and self.store.get(theirs).decode() != mine:
                raise TaskError(sentence(rank))

    def synchronize(self) -> None:
        """Wait until the device has finished all work."""
        synchronize(self.device)

    def barrier(self) -> None:
        """Wait until all ranks have made this call."""
        if self.size > 1:
            dist.barrier(device_ids=self.barrier_devices)

    def require_same_world(self, library: str, *, rank: int, size: int) -> World:
        """Return this world, or raise WorldMismatch if a library sees another rank or size.

        Some libraries that miss the launcher's variables would start N worlds of one process each.
        """
        if (rank, size) != (self.rank, self.size):
            raise WorldMismatch(
                f"{library} sees rank {rank} of {size}, but the launcher {self.place.launcher!r} gave "
                f"rank {self.rank} of {self.size}"
            )
        return self

    def set_variables(self, **variables: object) -> None:
        """Set environment variables that a library needs; `close` restores the old values."""
        self.restore_variables(*variables)
        os.environ.update({name: str(value) for name, value in variables.items()})

    def restore_variables(self, *names: str) -> None:
        """Remember the values of environment variables that a library will set; `close` restores them."""
        for name in names:
            self._environ.setdefault(name, os.environ.get(name))

    def close(self) -> None:
        """Leave the world together with the other ranks."""
        while self.closers:
            self.closers.pop()()
        self.close_without_peers()

    def close_without_peers(self) -> None:
        """Leave the world without the other ranks, which may have ended."""
        self.closers.clear()
        while self.local_closers:
            self.local_closers.pop()()
        if dist.is_initialized() and self.owns_group:
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
"""World that this process is in, if any."""

_left_groups: list[dist.ProcessGroup | None] = []
"""The last process groups that were left, kept alive to avoid a deadlock: DDP's reducer would free its group while it
holds the GIL, and wait for the group's thread, which may wait for the GIL to free a tensor. A group in this list is
freed later, without the GIL."""

atexit.register(_left_groups.clear)


def is_group_of_unipar() -> bool:
    """Return whether this process's process group, if it has one, is that of a world of unipar."""
    return any(world.owns_group for world in _current_worlds)


def leave_current_world() -> None:
    """Leave the world that this process is in after an error, if the process continues."""
    for world in _current_worlds[::-1]:  # the last one first: it has the process group
        world.close_without_peers()
