"""TCP stores: listen, connect, meet by a file."""

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
    if place.address is None:
        return place.local_size == place.size
    return ipaddress.ip_address(socket.gethostbyname(place.address[0])).is_loopback


def open_store(place: Place, patience: timedelta) -> dist.Store:
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
    """A socket on this address alone: left to itself the store listens everywhere."""
    try:
        return socket.create_server((host, port), backlog=128)
    except OSError as e:
        why = os.strerror(e.errno or 0)  # create_server adds the address to e.strerror
        raise WorldMismatch(
            f"{host}:{port} is taken ({why}): another run uses this port; give the launcher another "
            "(--master_port, --main_process_port, --master-port)"
        ) from None


def _store_by_file(place: Place, patience: timedelta) -> dist.Store:
    """For launchers that give no address: rank 0 listens on loopback and says where in the run folder."""
    said = place.meeting
    assert said is not None, f"{place.launcher} gives no address, so the processes need a folder to meet in"
    if place.rank == 0:
        listener = _listening_socket("127.0.0.1", 0)
        port = listener.getsockname()[1]
        write_file_atomically(said, str(port))
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
