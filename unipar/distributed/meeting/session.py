"""`Session`: a world whose ranks have found each other: its store, its machines. Each process keeps those it is in."""

from __future__ import annotations

import os
import socket
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
from unipar.distributed.machines import WorldMachines, machine_key
from unipar.distributed.meeting.alive_group import store_of_alive_group
from unipar.distributed.meeting.rendezvous import open_store
from unipar.distributed.meeting.roll_call import Presence, RollCall, call_roll
from unipar.distributed.place import Place
from unipar.errors import WorldMismatch


class Session:
    """Ranks that have found each other, for as long as their processes live."""

    def __init__(
        self, place: Place, store: dist.Store, machines: WorldMachines, *, restarts: int = 0, adopted: bool = False
    ) -> None:
        self.place, self.store, self.machines = place, store, machines
        self.adopted = adopted
        """Whether the process group was alive before unipar, and stays alive after it."""

        self.restarts = restarts
        """How often the launcher has started the ranks of this world again, as far as any of them knows."""

        self._launches = 0

    def next_launch(self) -> str:
        """Return a prefix for keys of the next launch; a script may launch twice in one foreign world."""
        self._launches += 1
        return f"launch/{self._launches}"


_sessions: dict[object, Session] = {}
"""Session by meeting point: rank 0 listens at an address until its process ends."""


def session_of(place: Place, patience: float, timeout: float, interface: str | None = None) -> Session:
    """Return the session of a world, which begins with the first call in a process.

    `patience`: seconds in which ranks on several machines must find each other; `timeout`: those of the store
    afterwards; `interface`: name of the network interface to use; None: the one on the way to rank 0.
    """
    adopted = store_of_alive_group()
    key = "group" if adopted is not None else place.address or place.server
    if key is not None and key in _sessions:
        return _sessions[key]
    session = _begin(place, adopted, patience if place.several_machines else timeout, timeout, interface)
    if key is not None:
        _sessions[key] = session
    return session


def _begin(place: Place, adopted: dist.Store | None, patience: float, timeout: float, interface: str | None) -> Session:
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
    store, machines = dist.PrefixStore(f"unipar/{roll.session}", store), _checked(place, roll)
    return Session(place, store, machines, restarts=roll.restarts, adopted=adopted is not None)


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


def _checked(place: Place, roll: RollCall) -> WorldMachines:
    """Return the machines of a roll call; raise WorldMismatch if the launcher has told other numbers."""
    here = roll.machines.of(place.rank)
    if len(here.ranks) != place.local_size:
        raise WorldMismatch(
            f"{place.launcher} says that {place.local_size} of {place.size} ranks are on {here.name}, and "
            f"{len(here.ranks)} have met there: two worlds at one address? ({roll.machines})"
        )
    return roll.machines


def interface_for(session: Session, chosen: str | None) -> str | None:
    """Return the network interface through which this rank reaches the others; None if it is not known."""
    if chosen is not None:
        return chosen
    if not session.machines.several:
        return "lo"
    address = session.machines.of(session.place.rank).address
    return "lo" if is_loopback(address) else interface_of(address)
