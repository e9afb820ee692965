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

LOOPBACK = "127.0.0.1"


@contextmanager
def serve_rendezvous(size: int, local_size: int, address: str = LOOPBACK) -> Generator[int]:
    """Context manager: run a server for `size` processes, `local_size` on each machine; yields its port."""
    server = RendezvousHTTPServer((address, 0), RendezvousHandler, 0)
    across = size // local_size
    server.init(
        [SlotInfo("localhost", r, r % local_size, r // local_size, size, local_size, across) for r in range(size)]
    )
    thread = threading.Thread(target=server.serve_forever, name="horovod-rendezvous", daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def rendezvous_variables(
    *, rank: int, size: int, local_size: int, port: int, address: str = LOOPBACK
) -> dict[str, str]:
    """Return the environment variables that a process needs before it initializes Horovod."""
    return {
        "HOROVOD_RANK": str(rank),
        "HOROVOD_SIZE": str(size),
        "HOROVOD_LOCAL_RANK": str(rank % local_size),
        "HOROVOD_LOCAL_SIZE": str(local_size),
        "HOROVOD_CROSS_RANK": str(rank // local_size),
        "HOROVOD_CROSS_SIZE": str(size // local_size),
        "HOROVOD_HOSTNAME": "localhost",
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_IFACE": "lo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
    }
