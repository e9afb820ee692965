"""Rendezvous through a TCP store, at a given address or by a file in the run folder."""

from __future__ import annotations

import ipaddress
import os
import socket
import time
from datetime import timedelta

import torch.distributed as dist

from unipar.distributed.place import Place
from unipar.errors import WorldMismatch
from unipar.utils.files import write_file_atomically


def on_loopback(place: Place) -> bool:
    """Return whether the processes meet on a loopback address; without an address, whether all are on one machine."""
    if place.address is None:
        return place.local_size == place.size
    return ipaddress.ip_address(socket.gethostbyname(place.address[0])).is_loopback


def open_store(place: Place, patience: timedelta) -> dist.Store:
    """Return a store connected to all ranks; `patience` is its timeout."""
    if place.address is None:
        return _store_by_file(place, patience)
    host, port = socket.gethostbyname(place.address[0]), place.address[1]
    lead = place.rank == 0 and not place.hosted
    if not lead:
        return dist.TCPStore(host, port, place.size, False, patience, wait_for_workers=False)
    if place.listener is not None:
        fd = place.listener
    elif ipaddress.ip_address(host).is_loopback:
        fd = _listening_socket(host, port).detach()
    else:
        return dist.TCPStore(host, port, place.size, True, patience, wait_for_workers=False)
    return dist.TCPStore(host, port, place.size, True, patience, wait_for_workers=False, master_listen_fd=fd)


def _listening_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens on this address alone; the store's own would listen on all interfaces."""
    try:
        return socket.create_server((host, port), backlog=128)
    except OSError as e:
        why = os.strerror(e.errno or 0)  # create_server adds the address to e.strerror
        raise WorldMismatch(
            f"{host}:{port} is taken ({why}): another run uses this port; give the launcher another port "
            "(--master_port, --main_process_port, --master-port)"
        ) from None


def _store_by_file(place: Place, patience: timedelta) -> dist.Store:
    """Return a store for a launcher that gives no address: rank 0 listens on loopback and writes its port to a file."""
    port_file = place.meeting
    assert port_file is not None, f"{place.launcher} gives no address, so the processes need a folder to meet in"
    if place.rank == 0:
        listener = _listening_socket("127.0.0.1", 0)
        port = listener.getsockname()[1]
        write_file_atomically(port_file, str(port))
        return dist.TCPStore(
            "127.0.0.1", port, place.size, True, patience, wait_for_workers=False, master_listen_fd=listener.detach()
        )
    until = time.monotonic() + patience.total_seconds()
    while not port_file.exists():
        if time.monotonic() > until:
            raise WorldMismatch(
                f"rank {place.rank} waited {patience.total_seconds():g} s for rank 0 to write its port to {port_file}"
            )
        time.sleep(0.02)
    port = int(port_file.read_text("utf-8"))
    return dist.TCPStore("127.0.0.1", port, place.size, False, patience, wait_for_workers=False)
