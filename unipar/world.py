"""The processes of a run, met: one torch process group of our own, and the backend's library on top."""

from __future__ import annotations

import atexit
import ipaddress
import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from unipar.config import Config
from unipar.errors import TaskError, WorldMismatch
from unipar.files import write_whole
from unipar.place import Place


class World:
    """Who this process is among the others, and the few collectives that the loop needs."""

    def __init__(self, place: Place, device: torch.device, store: dist.Store | None) -> None:
        self.place, self.device, self.store = place, device, store
        self.rank, self.size = place.rank, place.size
        self.closers: list[Callable[[], None]] = []
        """What a library needs done before the process group goes; the latest first."""
        self.alone: list[Callable[[], None]] = []
        """What a library forgets by itself, without the others; done after an error as well."""
        self._keys = 0
        self._environ: dict[str, str | None] = {}
        _now.append(self)

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

    def agreed(self, library: str, *, rank: int, size: int) -> World:
        """Itself, if the library sees the same world: left alone, several make N worlds of one."""
        if (rank, size) != (self.rank, self.size):
            raise WorldMismatch(
                f"{library} sees rank {rank} of {size}, the launcher {self.place.launcher!r} said "
                f"rank {self.rank} of {self.size}"
            )
        return self

    def tell(self, **variables: object) -> None:
        """Set what a library insists on in the environment, until this world is closed."""
        self.guard(*variables)
        os.environ.update({name: str(value) for name, value in variables.items()})

    def guard(self, *names: str) -> None:
        """Variables that a library sets by itself are as they were once this world is closed."""
        for name in names:
            self._environ.setdefault(name, os.environ.get(name))

    def close(self) -> None:
        while self.closers:
            self.closers.pop()()
        self.drop()

    def drop(self) -> None:
        """Leave without the others: they may be gone."""
        self.closers.clear()
        while self.alone:
            self.alone.pop()()
        if dist.is_initialized():
            _past[:] = [*_past[-1:], dist.group.WORLD]
            dist.destroy_process_group()
        _now.remove(self)
        for name, value in self._environ.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self._environ.clear()


_now: list[World] = []
"""The world that this process is in, if any."""

_past: list[dist.ProcessGroup | None] = []
"""The last groups that were left. DDP's reducer would free its own while it holds the GIL, and wait for the group's
thread, which may wait for the GIL to free a tensor. From here it is freed later, and without the GIL."""
atexit.register(_past.clear)


def abandon() -> None:
    """After an error, in a process that goes on: leave the world that it is in."""
    for world in _now:
        world.drop()


def device_of(config: Config, place: Place) -> torch.device:
    """Where this rank computes."""
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if ":" in config.device:
        return torch.device(config.device)
    return torch.device("cuda", place.local_rank)


def transport(config: Config, device: torch.device) -> str:
    """NCCL wants a GPU for each rank; `device: cuda:N` lets ranks share one over gloo."""
    if device.type != "cuda" or ":" in config.device:
        return "gloo"
    return (
        "nccl" if config.model.offload == "none" else "cpu:gloo,cuda:nccl"
    )  # norms of what waits in the host's memory


_stores: dict[tuple[str, int] | None, dist.Store] = {}
"""Where this process has met others: rank 0 listens there as long as it lives."""

_met: list[Place] = []
"""Every world that this process was in."""


def meet(config: Config, place: Place) -> World:
    """Join the other processes of this run; afterwards torch.distributed works on every rank."""
    device = device_of(config, place)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    patience = timedelta(seconds=config.launch.timeout)
    if place.size == 1 and place.address is None:
        store: dist.Store = dist.HashStore()
    elif place.address in _stores:
        store = _stores[place.address]
    else:
        store = _store(place, patience)
        if place.address is not None:
            _stores[place.address] = store
    _met.append(place)
    store = dist.PrefixStore(f"unipar/{len(_met)}", store)  # a script may launch twice in one foreign world
    world = World(place, device, store)
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if place.ours or (_on_loopback(place) and variable not in os.environ):
            world.tell(**{variable: "lo"})
    kind = transport(config, device)
    dist.init_process_group(
        kind,
        store=store,
        rank=place.rank,
        world_size=place.size,
        timeout=patience,
        device_id=device if "nccl" in kind else None,
    )
    if (dist.get_rank(), dist.get_world_size()) != (place.rank, place.size):
        raise WorldMismatch(f"torch sees rank {dist.get_rank()} of {dist.get_world_size()}, not {place}")
    return world


def _on_loopback(place: Place) -> bool:
    if place.address is None:
        return place.local_size == place.size
    return ipaddress.ip_address(socket.gethostbyname(place.address[0])).is_loopback


def _store(place: Place, patience: timedelta) -> dist.Store:
    if place.address is None:
        return _by_file(place, patience)
    host, port = socket.gethostbyname(place.address[0]), place.address[1]
    lead = place.rank == 0 and not place.hosted
    if not lead:
        return dist.TCPStore(host, port, place.size, False, patience, wait_for_workers=False)
    if place.listener is not None:
        fd = place.listener
    elif ipaddress.ip_address(host).is_loopback:
        fd = _listening(host, port).detach()
    else:
        return dist.TCPStore(host, port, place.size, True, patience, wait_for_workers=False)
    return dist.TCPStore(host, port, place.size, True, patience, wait_for_workers=False, master_listen_fd=fd)


def _listening(host: str, port: int) -> socket.socket:
    """A socket on this address alone: left to itself the store listens everywhere."""
    try:
        return socket.create_server((host, port), backlog=128)
    except OSError as e:
        why = os.strerror(e.errno or 0)  # create_server adds the address to e.strerror
        raise WorldMismatch(
            f"{host}:{port} is taken ({why}): another run uses this port; give the launcher another "
            "(--master_port, --main_process_port, --master-port)"
        ) from None


def _by_file(place: Place, patience: timedelta) -> dist.Store:
    """For launchers that give no address: rank 0 listens on loopback and says where in the run folder."""
    said = place.meeting
    assert said is not None, f"{place.launcher} gives no address, so the processes need a folder to meet in"
    if place.rank == 0:
        listener = _listening("127.0.0.1", 0)
        port = listener.getsockname()[1]
        write_whole(said, str(port))
        return dist.TCPStore(
            "127.0.0.1", port, place.size, True, patience, wait_for_workers=False, master_listen_fd=listener.detach()
        )
    until = time.monotonic() + patience.total_seconds()
    while not said.exists():
        if time.monotonic() > until:
            raise WorldMismatch(
                f"rank {place.rank} waited {patience.total_seconds():g} s for rank 0 to say where to meet"
            )
        time.sleep(0.02)
    return dist.TCPStore("127.0.0.1", int(said.read_text("utf-8")), place.size, False, patience, wait_for_workers=False)
