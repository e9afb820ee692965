"""Processes that fetch samples: signals to all processes of a run do not end them before their rank."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any


def with_worker_start(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a DataLoader, whose workers begin with `begin_data_worker`."""
    return {**arguments, "worker_init_fn": partial(begin_data_worker, arguments.get("worker_init_fn"))}


def begin_data_worker(then: Callable[[int], None] | None, worker: int) -> None:
    """Have this process end with its rank, not before it, then call the user's own `worker_init_fn`.

    Launchers and schedulers send their signals to all processes. A rank stops at a step boundary after one, and needs
    its samples up to there.
    """
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    threading.Thread(target=_end_when_rank_says, name="signals", daemon=True).start()
    if then is not None:
        then(worker)


def _end_when_rank_says() -> None:
    """End this process when its parent sends SIGTERM; leave out that of others."""
    while signal.sigwaitinfo([signal.SIGTERM]).si_pid != os.getppid():
        continue
    os._exit(0)
