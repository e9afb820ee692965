"""`Links`: connections between the machines of a world and their ranks, in a tree, over which messages go.

The system itself sees whether the other end of a link is there: it answers for a process that is busy, and no longer
for a machine that is lost.
"""

from __future__ import annotations

import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, Final, final

from unipar.distributed.addresses import is_ipv6, with_port
from unipar.distributed.meeting.frames import FramedConnection
from unipar.distributed.meeting.roll_call import wait_for_key
from unipar.errors import WorldMismatch

if TYPE_CHECKING:
    import torch.distributed as dist

    from unipar.distributed.meeting.neighbours import Neighbours
    from unipar.distributed.world_machines import WorldMachine

CONNECT_SECONDS: Final = 10.0
"""Seconds in which a connection between two machines must be made; more means that it is blocked."""

_MOST_OF_A_STRANGER: Final = 200
"""Bytes that a connection may say before it is known to be a rank's."""


@final
class RankLink(FramedConnection):
    """One end of a connection to another rank."""

    def __init__(self, connection: socket.socket, rank: int) -> None:
        super().__init__(connection)
        self.rank = rank
        """Rank at the other end."""


@final
class Links:
    """Links of this rank: to the rank above it, if it is not rank 0, and to those below."""

    def __init__(self, store: dist.Store, rank: int, neighbours: Neighbours, silence: float) -> None:
        """`silence`: seconds without an answer of the other end's system, after which a link is lost."""
        self._rank, self._neighbours = rank, neighbours
        self.parent: RankLink | None = None
        self.children: list[RankLink] = []
        self._wake, self._woken = os.pipe()
        self._closing = False
        self._reader: threading.Thread | None = None
        self._open(store)
        self.set_patience(silence)

    def _open(self, store: dist.Store) -> None:
        """Connect to the rank above, and be connected to by those below."""
        rank, key = self._rank, "links"
        above, below = self._neighbours.rank_above(rank), self._neighbours.ranks_below(rank)
        word = secrets.token_hex(8)
        with ExitStack() as failed:
            listener = failed.enter_context(listen_for_ranks(self._neighbours.here)) if below else None
            if listener is not None:
                store.set(f"{key}/{rank}", f"{listener.getsockname()[1]} {word}")
            if above is not None:
                late = f"rank {rank} waited {3 * CONNECT_SECONDS:g} s for rank {above} to open a port"
                port, echo = wait_for_key(store, f"{key}/{above}", time.monotonic() + 3 * CONNECT_SECONDS, late).split()
                self.parent = RankLink(failed.enter_context(self._connect(above, int(port))), above)
                self._send(self.parent, {"rank": rank, "word": echo})
            if listener is not None:
                self.children = _accept(listener, word, len(below), failed)
            failed.pop_all()
        if listener is not None:
            listener.close()

    @property
    def all(self) -> list[RankLink]:
        """Links to the ranks below, and to the one above."""
        return [*self.children, *([self.parent] if self.parent is not None else [])]

    def _connect(self, above: int, port: int) -> socket.socket:
        there, here = self._neighbours.machine_above(self._rank), self._neighbours.here
        address = there.address or "127.0.0.1"
        try:
            return socket.create_connection((address, port), timeout=CONNECT_SECONDS)
        except OSError as e:
            why = "no answer" if isinstance(e, TimeoutError) else (e.strerror or str(e))
            raise WorldMismatch(
                f"{here} cannot connect to {with_port(address, port)} on {there} ({why}), though it has found the "
                "ranks there: a firewall between the two? gloo and NCCL connect at ports of the range "
                "net.ipv4.ip_local_port_range: open it between the machines, or choose another network "
                "(machines.interface)"
            ) from None

    def set_patience(self, silence: float) -> None:
        """Have the system tell when another end has not answered for `silence` seconds."""
        for link in self.all:
            link.set_patience(silence)

    def read_in_background(
        self,
        on_message: Callable[[RankLink, dict[str, Any]], None],
        on_loss: Callable[[RankLink, OSError | None], None],
    ) -> None:
        """Call `on_message` for each message, and `on_loss` for a link whose other end has gone: why, or None."""
        self._reader = threading.Thread(target=self._read, args=(on_message, on_loss), name="links", daemon=True)
        self._reader.start()

    def _read(
        self,
        on_message: Callable[[RankLink, dict[str, Any]], None],
        on_loss: Callable[[RankLink, OSError | None], None],
    ) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake, selectors.EVENT_READ)
            for link in self.all:
                selector.register(link.connection, selectors.EVENT_READ, link)
                for message, _ in link.messages():  # that have come with the first one
                    on_message(link, message)
            while not self._closing:
                for key, _ in selector.select():
                    link: RankLink | None = key.data
                    if link is not None and not self._read_link(link, on_message, on_loss):
                        selector.unregister(link.connection)

    def _read_link(
        self,
        link: RankLink,
        on_message: Callable[[RankLink, dict[str, Any]], None],
        lost: Callable[[RankLink, OSError | None], None],
    ) -> bool:
        """Read what has come over a link; return whether more may come."""
        goes_on, why = False, None
        try:
            goes_on = link.read()
        except OSError as e:
            why = e
        for message, _ in link.messages():
            on_message(link, message)
        if not goes_on and not self._closing:
            lost(link, why)
        return goes_on

    def send_up(self, message: dict[str, Any]) -> bool:
        """Send a message to the rank above; return whether there is one, and its system took it."""
        return self.parent is not None and self._send(self.parent, message)

    def send_down(self, message: dict[str, Any], *, here: bool = False) -> None:
        """Send a message to the ranks below; `here`: to those of this machine alone."""
        for link in self.children:
            if not here or link.rank in self._neighbours.here.ranks:
                self._send(link, message)

    def send_to_all(self, message: dict[str, Any]) -> None:
        """Send a message over all links."""
        for link in self.all:
            self._send(link, message)

    @staticmethod
    def _send(link: RankLink, message: dict[str, Any]) -> bool:
        try:
            link.send(message)
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Close all links."""
        self._closing = True
        os.write(self._woken, b"x")
        if self._reader is not None:
            self._reader.join()
        for link in self.all:
            with suppress(OSError):
                link.connection.close()
        os.close(self._wake)
        os.close(self._woken)


def listen_for_ranks(here: WorldMachine) -> socket.socket:
    """Return a socket at a port that the system chose, at the address by which others know this machine."""
    address = here.address or "127.0.0.1"
    family = socket.AF_INET6 if is_ipv6(address) else socket.AF_INET
    try:
        listener = socket.create_server((address, 0), family=family, backlog=1024)
    except OSError:  # others know this machine by an address that is not its own, such as a service's
        listener = socket.create_server(("", 0), family=family, backlog=1024)
    listener.settimeout(3 * CONNECT_SECONDS)
    return listener


def _accept(listener: socket.socket, word: str, number: int, failed: ExitStack) -> list[RankLink]:
    """Return links to this many ranks, which know the word; raise WorldMismatch if they do not come in time."""
    links: list[RankLink] = []
    while len(links) < number:
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            raise WorldMismatch(
                f"{socket.gethostname()} was connected to by {len(links)} of {number} ranks at an arbitrary port: a "
                "firewall? the other machines' logs say which could not"
            ) from None
        failed.enter_context(connection)
        connection.settimeout(CONNECT_SECONDS)
        link = RankLink(connection, -1)
        with suppress(OSError, ValueError, KeyError, TypeError):  # it is no rank
            first, _ = link.receive(_MOST_OF_A_STRANGER)
            link.rank = int(first["rank"]) if first["word"] == word else -1
        if link.rank < 0:
            link.close()
        else:
            link.received = 0
            links.append(link)
    return links
