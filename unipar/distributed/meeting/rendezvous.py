"""Rendezvous through a TCP store: at a given address, by a launcher's own server, or by a file in the run folder."""

from __future__ import annotations

import os
import socket
import threading
import time
import urllib.error
import urllib.request
from datetime import timedelta

import torch.distributed as dist

from unipar.distributed.addresses import (
    is_ipv6,
    is_loopback,
    own_address_toward,
    resolve_host,
    with_port,
)
from unipar.distributed.place import Place
from unipar.errors import WorldMismatch
from unipar.utils.files import write_file_atomically

_FOR_AN_ANSWER = 2.0
"""Seconds after which a store that is reached has answered, beyond those in which it can be reached."""

_MEETING_KEY = "unipar/meeting"
"""Scope and key under which rank 0 says its address in a launcher's server."""


def on_loopback(place: Place) -> bool:
    """Return whether the processes meet on a loopback address; without an address, whether all are on one machine."""
    if place.address is None:
        return not place.several_machines
    if place.several_machines and not _names_loopback(place.address[0]):
        return False
    return is_loopback(_resolve(place))


def _names_loopback(host: str) -> bool:
    """Return whether this is loopback on every machine: not the own name of a machine, which may be 127.0.1.1 there."""
    try:
        return host == "localhost" or is_loopback(host)
    except ValueError:
        return False


def open_store(place: Place, patience: timedelta) -> dist.Store:
    """Return a store connected to all ranks; `patience` is its timeout."""
    if place.server is not None:
        return _store_by_server(place, place.server, patience)
    if place.address is None:
        return _store_by_file(place, patience)
    host, port = _resolve(place), place.address[1]
    if place.rank or place.hosted:
        return _connect(place, host, port, patience)
    if place.listener is not None:
        return _serve(host, port, place, place.listener, patience)
    return _serve(host, port, place, _listening_socket(_address_to_bind(place, host), port).detach(), patience)


def _resolve(place: Place) -> str:
    assert place.address is not None
    return resolve_host(place.address[0], said_by=f"{place.launcher} gave the address of rank 0")


def _address_to_bind(place: Place, host: str) -> str:
    """Return the address at which rank 0 listens: its own, or "" for all, where others know it by another one."""
    if is_loopback(host):  # the machine's own name is on loopback, as on Debian, and not so on others
        return host if on_loopback(place) else ""
    return host if own_address_toward(host) == host else ""


def _serve(host: str, port: int, place: Place, listener: int, patience: timedelta) -> dist.Store:
    return dist.TCPStore(host, port, place.size, True, patience, wait_for_workers=False, master_listen_fd=listener)


def _connect(place: Place, host: str, port: int, patience: timedelta) -> dist.Store:
    """Return a connection to rank 0's store; a program that took the port and says nothing is no reason to wait."""
    outcomes: list[dist.Store | RuntimeError] = []

    def connect() -> None:
        try:
            outcomes.append(dist.TCPStore(host, port, place.size, False, patience, wait_for_workers=False))
        except RuntimeError as e:
            outcomes.append(e)

    # In a thread, as torch waits for the first answer without a limit.
    thread = threading.Thread(target=connect, name="unipar-connect", daemon=True)
    thread.start()
    thread.join(patience.total_seconds() + _FOR_AN_ANSWER)
    if not outcomes:
        limit = "launch.rendezvous_timeout" if place.several_machines else "launch.timeout"
        raise WorldMismatch(
            f"rank {place.rank} on {socket.gethostname()} is connected to {with_port(host, port)}, but what listens "
            f"there has not answered within {patience.total_seconds():g} s ({limit}): it is not rank 0 but another "
            "program; give the launcher another port, or set MASTER_ADDR and MASTER_PORT yourself"
        )
    if isinstance(store := outcomes[0], RuntimeError):
        if not place.several_machines:
            raise store
        raise WorldMismatch(
            f"rank {place.rank} on {socket.gethostname()} could not connect to {with_port(host, port)}, where rank 0 "
            f"listens, within {patience.total_seconds():g} s (launch.rendezvous_timeout): was the launcher started on "
            f"rank 0's machine, and is there a way to it (a firewall, another network)? "
            f"({str(store).partition(chr(10))[0][:200]})"
        ) from None
    return store


def _listening_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens on this address alone, or with "" on all; the store's own would listen on all."""
    try:
        if not host and socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
        family = socket.AF_INET6 if is_ipv6(host) else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as e:
        why = os.strerror(e.errno or 0)  # create_server adds the address to e.strerror
        raise WorldMismatch(
            f"{with_port(host, port)} is taken ({why}): another run uses this port; give the launcher another port "
            "(--master_port, --main_process_port, --master-port), or set MASTER_ADDR and MASTER_PORT yourself"
        ) from None


def _store_by_file(place: Place, patience: timedelta) -> dist.Store:
    """Return a store for a launcher that gives no address: rank 0 listens on loopback and writes its port to a file."""
    port_file = place.meeting
    assert port_file is not None, f"{place.launcher} gives no address, so the processes need a folder to meet in"
    if place.rank == 0:
        listener = _listening_socket("127.0.0.1", 0)
        port = listener.getsockname()[1]
        write_file_atomically(port_file, str(port))
        return _serve("127.0.0.1", port, place, listener.detach(), patience)
    until = time.monotonic() + patience.total_seconds()
    while not port_file.exists():
        if time.monotonic() > until:
            raise WorldMismatch(
                f"rank {place.rank} waited {patience.total_seconds():g} s for rank 0 to write its port to {port_file}"
            )
        time.sleep(0.02)
    return _connect(place, "127.0.0.1", int(port_file.read_text("utf-8")), patience)


def _store_by_server(place: Place, server: tuple[str, int], patience: timedelta) -> dist.Store:
    """Return a store whose address rank 0 says in the launcher's own key-value server, over HTTP."""
    host = resolve_host(server[0], said_by=f"{place.launcher} gave the address of its server")
    url = f"http://{with_port(host, server[1])}/{_MEETING_KEY}"
    if place.rank == 0:
        mine = own_address_toward(host)
        listener = _listening_socket("" if is_loopback(mine) else mine, 0)
        port = listener.getsockname()[1]
        request = urllib.request.Request(url, data=f"{mine} {port}".encode(), method="PUT")
        urllib.request.urlopen(request, timeout=30).close()
        return _serve(mine, port, place, listener.detach(), patience)
    until = time.monotonic() + patience.total_seconds()
    while True:
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                host, port = answer.read().decode().split()
                return _connect(place, host, int(port), patience)
        except urllib.error.HTTPError:  # rank 0 has said nothing yet
            if time.monotonic() > until:
                raise WorldMismatch(
                    f"rank {place.rank} waited {patience.total_seconds():g} s (launch.rendezvous_timeout) for rank 0 "
                    f"to say its address at {place.launcher}'s server ({with_port(*server)})"
                ) from None
            time.sleep(0.05)
