"""Rendezvous of Horovod's processes: Horovod's own key-value server, bound to one address.

Horovod's function that starts the server is not used: it listens on every interface without authentication, and
reads pickles back. The server itself stores bytes and unpickles nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager

from horovod.runner.common.util.hosts import SlotInfo
from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

from unipar.distributed.addresses import LOOPBACK
from unipar.distributed.world_machines import WorldMachines


def slots_of(machines: WorldMachines) -> list[SlotInfo]:
    """Return Horovod's own description of each rank: its machine, and its place there and across machines."""
    size = sum(len(machine.ranks) for machine in machines.all)
    slots: list[SlotInfo] = []
    for rank in range(size):
        here, local = machines.of(rank), machines.local_rank(rank)
        across = [index for index, machine in enumerate(machines.all) if len(machine.ranks) > local]
        index = machines.index_of(rank)
        name = f"machine{index}" if machines.several else "localhost"
        slots.append(SlotInfo(name, rank, local, across.index(index), size, len(here.ranks), len(across)))
    return slots


@contextmanager
def serve_rendezvous(slots: list[SlotInfo], address: str = LOOPBACK) -> Generator[int]:
    """Context manager: run a server for these ranks; yields its port."""
    server = RendezvousHTTPServer((address, 0), RendezvousHandler, 0)
    server.init(slots)
    thread = threading.Thread(target=server.serve_forever, name="horovod-rendezvous", daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def rendezvous_variables(
    slot: SlotInfo, *, port: int, address: str = LOOPBACK, interface: str = "lo"
) -> dict[str, str]:
    """Return the environment variables that a process needs before it initializes Horovod."""
    return {
        "HOROVOD_RANK": str(slot.rank),
        "HOROVOD_SIZE": str(slot.size),
        "HOROVOD_LOCAL_RANK": str(slot.local_rank),
        "HOROVOD_LOCAL_SIZE": str(slot.local_size),
        "HOROVOD_CROSS_RANK": str(slot.cross_rank),
        "HOROVOD_CROSS_SIZE": str(slot.cross_size),
        "HOROVOD_HOSTNAME": slot.hostname,
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_IFACE": interface,
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
    }
