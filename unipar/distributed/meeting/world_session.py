"""`Session`: a world whose ranks have found each other: its store, its machines. Each process keeps those it is in."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from unipar.distributed.addresses import (
    address_of_interface,
    interface_of,
    is_ipv6,
    is_loopback,
    own_address_toward,
    resolve_host,
)
from unipar.distributed.meeting.alive_group import store_of_alive_group
from unipar.distributed.meeting.rendezvous import open_store
from unipar.distributed.meeting.roll_call import Presence, call_roll, decide_together, read_machines
from unipar.distributed.meeting.tree import RankTree
from unipar.distributed.place import Place
from unipar.distributed.world_machines import WorldMachines, machine_key
from unipar.errors import WorldMismatch


class Session:
    """Ranks that have found each other, for as long as their processes live."""

    def __init__(
        self,
        place: Place,
        store: dist.Store,
        machines: WorldMachines,
        tree: RankTree | None = None,
        *,
        restarts: int = 0,
        adopted: bool = False,
    ) -> None:
        self.place, self.store, self.machines = place, store, machines
        self.tree = tree
        """Links to the other ranks; None if all are on one machine, or none were asked for."""

        self.adopted = adopted
        """Whether the process group was alive before unipar, and stays alive after it."""

        self.restarts = restarts
        """Number of times that the launcher has started the ranks of this world again, as far as any of them knows."""

        self._launches = 0

    def next_launch(self) -> str:
        """Return a prefix for keys of the next launch; a script may launch twice in one foreign world."""
        self._launches += 1
        return f"launch/{self._launches}"

    def decide(self, name: str, mine: str, judge: Callable[[list[str]], str], patience: float) -> str:
        """Return what `judge` on rank 0 makes of the texts of all ranks; an error that it raises is raised on all.

        `name` is new in this session.
        """
        if self.tree is not None:
            return self.tree.decide(name, mine, judge, patience)
        return decide_together(self.store, self.place.rank, self.place.size, name, mine, judge, patience)


_sessions: dict[object, Session] = {}
"""Session by meeting point: rank 0 listens at an address until its process ends."""


def session_of(
    place: Place, patience: float, timeout: float, interface: str | None = None, *, linked: bool = True
) -> Session:
    """Return the session of a world, which begins with the first call in a process.

    `patience`: seconds in which ranks on several machines must find each other; `timeout`: those of the store
    afterwards; `interface`: name of the network interface to use; None: the one on the way to rank 0; `linked`:
    whether ranks on several machines are connected to one another.
    """
    adopted = store_of_alive_group()
    key = "group" if adopted is not None else place.address or place.server
    if key is not None and key in _sessions:
        return _sessions[key]
    session = _begin(place, adopted, patience if place.several_machines else timeout, timeout, interface, linked=linked)
    if key is not None:
        _sessions[key] = session
    return session


def _begin(
    place: Place,
    adopted: dist.Store | None,
    patience: float,
    timeout: float,
    interface: str | None,
    *,
    linked: bool,
) -> Session:
    if place.size == 1 and place.address is None and adopted is None:
        return Session(place, dist.HashStore(), WorldMachines.one(1))
    store = open_store(place, timedelta(seconds=patience)) if adopted is None else adopted
    if not place.several_machines:
        # torchrun keeps its store when it restarts the ranks: what they wrote before must not be read again
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if place.hosted else "0"
        store = dist.PrefixStore(f"attempt/{attempt}", store)
        return Session(place, store, WorldMachines.one(place.size), adopted=adopted is not None)
    desk = dist.PrefixStore("unipar/roll", store)
    roll = call_roll(desk, place.rank, place.size, _presence(place, interface), patience, own_address_toward)
    if adopted is None:
        store.set_timeout(timedelta(seconds=timeout))
    store = dist.PrefixStore(f"unipar/{roll.session}", store)
    tree = None
    if linked:
        tree = RankTree(store, place.rank, place.size, roll.neighbours, timeout)
        machines = link_all(tree, place, roll.machines, patience)
    else:
        machines = read_machines(desk, roll)
    return Session(place, store, machines, tree, restarts=roll.restarts, adopted=adopted is not None)


def link_all(tree: RankTree, place: Place, machines: WorldMachines | None, patience: float) -> WorldMachines:
    """Return the machines that rank 0 tells once all ranks are linked; raise the same WorldMismatch on all if not."""

    def judge(texts: list[str]) -> str:
        assert machines is not None
        _check_numbers(machines, place.size, [json.loads(text) for text in texts])
        return json.dumps(machines.to_json())

    try:
        answer = tree.decide("linked", json.dumps([place.launcher, place.local_size]), judge, patience)
    except WorldMismatch:
        tree.close()
        raise
    tree.machines = WorldMachines.from_json(json.loads(answer))
    return tree.machines


def _presence(place: Place, interface: str | None) -> Presence:
    at = place.address or place.server
    peer = resolve_host(at[0]) if at is not None else "127.0.0.1"
    if interface is not None:
        address = address_of_interface(interface, ipv6=is_ipv6(peer))
        if address is None:
            names = ", ".join(name for _, name in socket.if_nameindex())
            raise WorldMismatch(
                f"machines.interface: {interface} has no address on {socket.gethostname()}; its interfaces: {names}"
            )
    else:
        address = own_address_toward(peer)
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    return Presence(machine_key(), socket.gethostname(), address, int(count) if count.isdecimal() else 0)


def _check_numbers(machines: WorldMachines, size: int, sizes: list[tuple[str, int]]) -> None:
    """Raise WorldMismatch if the launcher has told a rank another number of ranks on its machine than have met."""
    for rank, (launcher, local_size) in enumerate(sizes):
        here = machines.of(rank)
        if len(here.ranks) != local_size:
            raise WorldMismatch(
                f"{launcher} says that {local_size} of {size} ranks are on {here.name}, and {len(here.ranks)} have met "
                f"there: two worlds at one address? ({machines})"
            )


def interface_for(session: Session, chosen: str | None) -> str | None:
    """Return the network interface through which this rank reaches the others; None if it is not known."""
    if chosen is not None:
        return chosen
    if not session.machines.several:
        return "lo"
    address = session.machines.of(session.place.rank).address
    return "lo" if is_loopback(address) else interface_of(address)
