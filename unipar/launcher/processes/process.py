"""Processes that this one watches, whoever forked them; signals to them and to what they started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Protocol, final

from unipar.distributed.addresses import LOOPBACK
from unipar.launcher.processes.worker_arguments import WorkerArguments
from unipar.utils import procfs

SECONDS_TO_VANISH = 0.5
"""Seconds to wait until the kernel has removed killed processes."""


class WorkerProcess(Protocol):
    """Worker process; until it is reaped no other process has its id, so signals reach no stranger."""

    @property
    def pid(self) -> int: ...

    @property
    def pidfd(self) -> int: ...

    def reap(self) -> int:
        """Return the exit code of a process that has ended, or minus the signal."""
        ...


class WorkerStarter(Protocol):
    """Way to start workers: as new interpreters, or as forks."""

    def start(self, arguments: WorkerArguments, environment: Mapping[str, str], log: int) -> WorkerProcess:
        """Start one worker, whose stdout and stderr go to the descriptor `log`."""
        ...

    @property
    def pid(self) -> int:
        """Process id of the parent that the workers see."""
        ...

    @property
    def host(self) -> str:
        """Address of this machine at which the workers meet."""
        ...


@final
class ChildProcess:
    """Worker process that is a child of this process."""

    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        self._popen = popen
        self.pid = popen.pid
        self.pidfd = os.pidfd_open(popen.pid)

    def reap(self) -> int:
        return self._popen.wait()


@final
class SubprocessStarter:
    """Starter that runs each worker in a new interpreter."""

    @property
    def pid(self) -> int:
        return os.getpid()

    @property
    def host(self) -> str:
        return LOOPBACK

    def start(self, arguments: WorkerArguments, environment: Mapping[str, str], log: int) -> WorkerProcess:
        passed = [
            fd
            for fd in (
                arguments.parent_alive_fd,
                arguments.listener,
                arguments.control,
                arguments.pickled_task_fd,
                arguments.terminal,
            )
            if fd >= 0
        ]
        # -P: files in the current folder must not hide modules
        popen = subprocess.Popen(
            [sys.executable, "-P", "-m", "unipar.launcher.processes.worker", *arguments.to_command_line()],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=passed,
            start_new_session=True,
        )
        return ChildProcess(popen)


def send_signal(process: WorkerProcess, number: signal.Signals) -> None:
    """Send a signal to the process alone."""
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(process.pidfd, number)


def send_signal_to_group(process: WorkerProcess, number: signal.Signals) -> None:
    """Send a signal to the process and everything that it started; only before it is reaped."""
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        send_signal(process, number)  # a new fork that has not called setsid yet


def reap_process(process: WorkerProcess) -> int:
    """Return the exit code of a process that has ended, and kill what it has left running."""
    send_signal_to_group(process, signal.SIGKILL)
    code = process.reap()
    os.close(process.pidfd)
    until = time.monotonic() + SECONDS_TO_VANISH
    while _group_is_running(process.pid) and time.monotonic() < until:
        time.sleep(0.002)
    return code


def _group_is_running(group: int) -> bool:
    """Return whether a process of this group is still running; zombies are not."""
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return any(
        stat[procfs.GROUP] == str(group) and stat[procfs.STATE] not in "ZX" for stat in procfs.all_process_stats()
    )
