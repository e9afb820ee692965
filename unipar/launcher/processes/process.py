"""A process that this one watches, whoever forked it; and signals to it and to all that it started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Protocol, final

from unipar.launcher.processes.worker_arguments import Orders
from unipar.utils import procfs

VANISH = 0.5
"""Seconds to wait until the kernel has taken away what was killed."""


class Process(Protocol):
    """Until it is reaped its id is its own, so that signals reach no stranger."""

    @property
    def pid(self) -> int: ...

    @property
    def pidfd(self) -> int: ...

    def reap(self) -> int:
        """The exit code of a process that has ended, or minus the signal."""
        ...


class Starter(Protocol):
    """Starts one worker; `log` takes what it says."""

    def start(self, orders: Orders, environment: Mapping[str, str], log: int) -> Process: ...

    @property
    def pid(self) -> int:
        """The parent that the worker will see."""
        ...


@final
class Started:
    """A child of this process."""

    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        self._popen = popen
        self.pid = popen.pid
        self.pidfd = os.pidfd_open(popen.pid)

    def reap(self) -> int:
        return self._popen.wait()


@final
class Fresh:
    """Starts each worker as a new interpreter."""

    @property
    def pid(self) -> int:
        return os.getpid()

    def start(self, orders: Orders, environment: Mapping[str, str], log: int) -> Process:
        passed = [fd for fd in (orders.lifeline, orders.listener, orders.control, orders.parcel) if fd >= 0]
        popen = subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-m",
                "unipar.launcher.processes.worker",
                *orders.words(),
            ],  # -P: the folder we are in hides no module
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=passed,
            start_new_session=True,
        )
        return Started(popen)


def send(process: Process, number: signal.Signals) -> None:
    """To the process alone."""
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(process.pidfd, number)


def send_all(process: Process, number: signal.Signals) -> None:
    """To the process and everything that it started; only before it is reaped."""
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        send(process, number)  # a fork so young that it leads no group yet


def reap(process: Process) -> int:
    """Take the exit code of a process that has ended, and end what it left."""
    send_all(process, signal.SIGKILL)
    code = process.reap()
    os.close(process.pidfd)
    until = time.monotonic() + VANISH
    while _lives(process.pid) and time.monotonic() < until:
        time.sleep(0.002)
    return code


def _lives(group: int) -> bool:
    """Whether a process of this group still runs; one that is dead and waits for init does not."""
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return any(
        stat[procfs.GROUP] == str(group) and stat[procfs.STATE] not in "ZX" for stat in procfs.all_process_stats()
    )
