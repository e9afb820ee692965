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

from unipar.launcher.processes.worker_arguments import WorkerArguments
from unipar.utils import procfs

SECONDS_TO_VANISH = 0.5
"""Seconds to wait until the kernel has taken away what was killed."""


class WorkerProcess(Protocol):
    """Until it is reaped its id is its own, so that signals reach no stranger."""

    @property
    def pid(self) -> int: ...

    @property
    def pidfd(self) -> int: ...

    def reap(self) -> int:
        """The exit code of a process that has ended, or minus the signal."""
        ...


class WorkerStarter(Protocol):
    """Starts one worker; `log` takes what it says."""

    def start(self, orders: WorkerArguments, environment: Mapping[str, str], log: int) -> WorkerProcess: ...

    @property
    def pid(self) -> int:
        """The parent that the worker will see."""
        ...


@final
class ChildProcess:
    """A child of this process."""

    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        self._popen = popen
        self.pid = popen.pid
        self.pidfd = os.pidfd_open(popen.pid)

    def reap(self) -> int:
        return self._popen.wait()


@final
class SubprocessStarter:
    """Starts each worker as a new interpreter."""

    @property
    def pid(self) -> int:
        return os.getpid()

    def start(self, orders: WorkerArguments, environment: Mapping[str, str], log: int) -> WorkerProcess:
        passed = [
            fd for fd in (orders.parent_alive_fd, orders.listener, orders.control, orders.pickled_task_fd) if fd >= 0
        ]
        popen = subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-m",
                "unipar.launcher.processes.worker",
                *orders.to_command_line(),
            ],  # -P: the folder we are in hides no module
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=passed,
            start_new_session=True,
        )
        return ChildProcess(popen)


def send_signal(process: WorkerProcess, number: signal.Signals) -> None:
    """To the process alone."""
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(process.pidfd, number)


def send_signal_to_group(process: WorkerProcess, number: signal.Signals) -> None:
    """To the process and everything that it started; only before it is reaped."""
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        send_signal(process, number)  # a fork so young that it leads no group yet


def reap_process(process: WorkerProcess) -> int:
    """Take the exit code of a process that has ended, and end what it left."""
    send_signal_to_group(process, signal.SIGKILL)
    code = process.reap()
    os.close(process.pidfd)
    until = time.monotonic() + SECONDS_TO_VANISH
    while _group_is_running(process.pid) and time.monotonic() < until:
        time.sleep(0.002)
    return code


def _group_is_running(group: int) -> bool:
    """Whether a process of this group still runs; one that is dead and waits for init does not."""
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return any(
        stat[procfs.GROUP] == str(group) and stat[procfs.STATE] not in "ZX" for stat in procfs.all_process_stats()
    )
