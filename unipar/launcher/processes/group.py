"""N worker processes on this machine: started together, watched, and ended together."""

from __future__ import annotations

import os
import secrets
import selectors
import shutil
import signal
import socket
import sys
import termios
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from unipar.backend import Backend
from unipar.config.settled import SettledConfig
from unipar.errors import UniparError, WorkerFailed
from unipar.launcher.processes import postmortem
from unipar.launcher.processes.process import (
    SubprocessStarter,
    WorkerProcess,
    WorkerStarter,
    reap_process,
    send_signal,
    send_signal_to_group,
)
from unipar.launcher.processes.signals import SignalReceiver
from unipar.launcher.processes.watchdog import HangDetector, end_of_grace_while_saving
from unipar.launcher.processes.worker_arguments import WorkerArguments
from unipar.run_folder.layout import debugger_path, debugging_path, log_path, stack_path
from unipar.task import pickled
from unipar.utils.files import short_temporary_folder
from unipar.utils.procfs import cores_per_rank, count_oom_kills

SECONDS_TO_END = 3.0
"""Seconds that the other ranks have to end when one has failed."""

SECONDS_FOR_LOST_RANK = 1.0
"""Seconds to wait for the error of a rank whose loss another rank reports."""

_STOP_IN_DEBUGGER = "the run stops after the step that the debugger is in (c goes on); Ctrl-C again kills it"

CONTROL_MESSAGE_BYTES = 1 << 17
"""The longest message to or from a rank, in bytes."""


@dataclass(eq=False)
class _RankState:
    """One worker, as its parent knows it."""

    rank: int
    folder: str
    control: socket.socket | None = None
    process: WorkerProcess | None = None
    code: int | None = None
    messages: deque[bytes] = field(default_factory=deque[bytes])

    @property
    def alive(self) -> bool:
        return self.process is not None and self.code is None


class WorkerGroup:
    """Context manager: starts the workers on enter, kills on exit those that still run and removes their files."""

    def __init__(
        self,
        run: Path,
        size: int,
        entry: str,
        *,
        environment: Mapping[str, str] | None = None,
        heartbeat: float | None = None,
        timeout: float | None = None,
        grace: float = 30.0,
        control: bool = False,
        waits: Sequence[str] = (),
        pickled_task: bytes = b"",
        starter: WorkerStarter | None = None,
        debug_rank: int | None = None,
    ) -> None:
        self.run, self.size = run.resolve(), size
        self._debug_rank = debug_rank
        """Rank whose debugger has the terminal; None: no rank's."""

        self._terminal_settings: list[Any] = []
        self._entry, self._environment, self._grace, self._control = entry, environment or {}, grace, control
        self._pickled_task = pickled_task
        self._starter: WorkerStarter = starter or SubprocessStarter()
        name = f"unipar-{secrets.token_hex(4)}"
        self._ranks = [_RankState(rank, f"{short_temporary_folder()}/{name}-{rank}") for rank in range(size)]
        self._hang_detector = HangDetector(self.run, heartbeat, waits, timeout)
        self._selector = selectors.DefaultSelector()
        self._parent_alive_fd = -1
        self._stop_reason = ""
        self._stop_deadline = float("inf")

    @classmethod
    def of(
        cls,
        settled: SettledConfig,
        backend: Backend,
        run: Path,
        entry: str,
        environment: Mapping[str, str],
        *,
        control: bool = False,
        pickled_task: bytes = b"",
        starter: WorkerStarter | None = None,
        debug_rank: int | None = None,
    ) -> Self:
        """Return the workers of a settled config, watched as its `launch` section says."""
        settings = settled.config.launch
        return cls(
            run,
            settled.ranks,
            entry,
            environment=environment,
            heartbeat=settings.heartbeat,
            timeout=settings.timeout,
            grace=settings.shutdown_timeout,
            control=control,
            waits=backend.capabilities.waits,
            pickled_task=pickled_task,
            starter=starter,
            debug_rank=debug_rank,
        )

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.kill()
        finally:
            self._selector.close()

    def _start(self) -> None:
        self._kills_before = count_oom_kills()
        if self._debug_rank is not None:
            debugger_path(self.run).unlink(missing_ok=True)
            debugging_path(self.run).unlink(missing_ok=True)
            self._terminal_settings = termios.tcgetattr(0)
        # the kernel sends the parent-death signal when the thread that started the worker ends
        mortal = int(threading.current_thread() is threading.main_thread())
        environment = build_worker_environment(self.size, self._environment)
        with ExitStack() as passed:  # descriptors that the workers inherit, closed here once they are started
            reader, self._parent_alive_fd = os.pipe2(os.O_CLOEXEC)
            passed.callback(os.close, reader)
            _parent_alive_fds[self._parent_alive_fd] = self
            listener = self._open_listener(passed) if self.size > 1 else None
            pipes: list[int] = []
            for rank in self._ranks:
                theirs = self._open_control_socket(rank, passed)
                log = os.open(
                    log_path(self.run, rank.rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644
                )
                passed.callback(os.close, log)
                arguments = WorkerArguments(
                    rank=rank.rank,
                    size=self.size,
                    parent=self._starter.pid,
                    dies_with_thread=mortal,
                    parent_alive_fd=reader,
                    local_rank=rank.rank,
                    local_size=self.size,
                    host=self._starter.host,
                    listener=listener.fileno() if listener and rank.rank == 0 else -1,
                    port=listener.getsockname()[1] if listener else 0,
                    control=theirs,
                    pickled_task_fd=self._open_task_pipe(pipes, passed),
                    terminal=self._open_terminal(passed) if rank.rank == self._debug_rank else -1,
                    run=str(self.run),
                    entry=self._entry,
                    folder=rank.folder,
                )
                rank.process = self._starter.start(arguments, environment, log)
                self._selector.register(rank.process.pidfd, selectors.EVENT_READ, rank)
            if pipes:
                pickled.send_task(self._pickled_task, pipes)

    def _open_listener(self, passed: ExitStack) -> socket.socket:
        """Return rank 0's socket, made here, so that the port is known before ranks start, and is taken."""
        return passed.enter_context(socket.create_server((self._starter.host, 0), backlog=max(128, self.size)))

    def _open_terminal(self, passed: ExitStack) -> int:
        """Return a copy of standard input, which is a terminal."""
        terminal = os.dup(0)
        passed.callback(os.close, terminal)
        return terminal

    def _open_task_pipe(self, pipes: list[int], passed: ExitStack) -> int:
        """Return the worker's end of a pipe for the pickled task, or -1 if the task is in a file."""
        if not self._pickled_task:
            return -1
        reader, writer = os.pipe2(os.O_CLOEXEC)
        passed.callback(os.close, reader)
        pipes.append(writer)
        return reader

    def _open_control_socket(self, rank: _RankState, passed: ExitStack) -> int:
        """Return the worker's end of its control socket, or -1 if workers have none."""
        if not self._control:
            return -1
        rank.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        passed.enter_context(theirs)
        self._selector.register(rank.control, selectors.EVENT_READ, rank)
        return theirs.fileno()

    @property
    def running_pids(self) -> dict[int, int]:
        """Process ids of ranks that are still running, by rank."""
        return {r.rank: r.process.pid for r in self._ranks if r.process is not None and r.alive}

    def wait(self, tick: Callable[[], None] | None = None, every: float = 0.1) -> None:
        """Wait until all have ended with code 0; SIGINT or SIGTERM asks them to stop, a second signal kills them."""
        with SignalReceiver() as signals:
            self._selector.register(signals, selectors.EVENT_READ)
            try:
                while not self.poll(every if tick else None):
                    signals.drain()
                    if len(signals.received_signals) > 1:
                        self.kill()
                        raise postmortem.make_stopped_error(self.run, self.size, signals.received_signals[0].name)
                    if signals.received_signals and not self._stop_reason:
                        self.stop(signals.received_signals[0].name)
                    if tick:
                        tick()
            finally:
                self._selector.unregister(signals)

    def poll(self, timeout: float | None = None) -> bool:
        """Wait for an event, for at most `timeout` seconds; return whether all have ended with code 0."""
        failed = self._handle_events(self._patience(timeout))
        if self._stop_reason:
            if failed and not all(postmortem.was_stopped(self.run, rank) for rank in failed):
                # with one rank gone, the others do not reach a step boundary any more
                self._stop_deadline = min(self._stop_deadline, time.monotonic() + SECONDS_TO_END)
                self._grace = 0.0  # a save cannot end without it either
            return self._check_stopped()
        if failed:
            raise self._end_after_failure(failed)
        hung = None if self._debugging else self._hang_detector.find_hang(self.running_pids)
        if hung is not None:
            self.kill()
            raise hung
        return not self.running_pids

    @property
    def _debugging(self) -> bool:
        """Whether a debugger has started in a rank: time at its prompt does not count."""
        return self._debug_rank is not None and debugging_path(self.run).exists()

    def stop(self, why: str) -> None:
        """Ask all ranks to stop at the next step boundary; `poll` and `wait` raise Stopped when they have."""
        self._stop_reason = why
        self._stop_deadline = time.monotonic() + self._grace
        if self._debugging:
            self._stop_deadline = float("inf")
            sys.stderr.write(f"\n{why}: {_STOP_IN_DEBUGGER}\n")
        for rank in self._ranks:
            if rank.process is not None and rank.alive:
                send_signal(rank.process, signal.SIGTERM)

    def send_to_all(self, data: bytes) -> None:
        """Send a message to every rank's control socket; ranks that have ended are left out."""
        for rank in self._ranks:
            assert rank.control is not None
            try:
                rank.control.send(data)
            except (BrokenPipeError, ConnectionResetError):
                continue

    def receive_from_all(self, timeout: float | None = None) -> list[bytes]:
        """Return the next message of each rank; raise TimeoutError if one has not come after `timeout` seconds."""
        until = time.monotonic() + timeout if timeout is not None else float("inf")
        while not all(rank.messages for rank in self._ranks):
            ended = [rank.rank for rank in self._ranks if not rank.messages and not rank.alive]
            if ended:
                rank, log = ended[0], str(log_path(self.run, ended[0]))
                raise WorkerFailed(f"rank {rank} ended without an answer\n  its log: {log}", rank=rank, log=log)
            left = until - time.monotonic()
            if left <= 0:
                silent = ", ".join(str(rank.rank) for rank in self._ranks if not rank.messages)
                raise TimeoutError(f"no answer from rank {silent} for {timeout:g} s")
            self.poll(None if left == float("inf") else left)
        return [rank.messages.popleft() for rank in self._ranks]

    def _patience(self, timeout: float | None) -> float | None:
        waits = [w for w in (timeout, self._hang_detector.every) if w is not None]
        if self._stop_reason:
            waits.append(max(0.0, self._stop_deadline - time.monotonic()))
        return min(waits, default=None)

    def _handle_events(self, timeout: float | None) -> dict[int, int]:
        """Wait for events, keep messages and reap ranks that have ended; return the codes of those that failed."""
        if not self.running_pids:
            return {}
        failed: dict[int, int] = {}
        events = self._selector.select(timeout)
        for key, _ in events:
            rank = key.data
            if isinstance(rank, _RankState) and rank.control is not None and key.fileobj is rank.control:
                self._receive(rank)
        for key, _ in events:
            rank = key.data
            ended = isinstance(rank, _RankState) and rank.process is not None and key.fileobj == rank.process.pidfd
            if ended and (code := self._reap(rank)):
                failed[rank.rank] = code
        return failed

    def _receive(self, rank: _RankState) -> None:
        assert rank.control is not None
        try:
            message = rank.control.recv(CONTROL_MESSAGE_BYTES, socket.MSG_DONTWAIT)
        except ConnectionResetError:
            message = b""
        if message:
            rank.messages.append(message)
        else:
            self._selector.unregister(rank.control)

    def _reap(self, rank: _RankState) -> int:
        assert rank.process is not None
        self._selector.unregister(rank.process.pidfd)
        rank.code = -signal.SIGKILL  # if the exit code cannot be read
        try:
            rank.code = reap_process(rank.process)
        finally:
            shutil.rmtree(rank.folder, ignore_errors=True)
        return rank.code

    def _end_after_failure(self, failed: Mapping[int, int]) -> UniparError:
        """End the other ranks and return the error of the one that failed first."""
        if all(postmortem.was_stopped(self.run, rank) for rank in failed):  # a signal was sent to ranks, not to us
            self._stop_reason, self._stop_deadline = "a signal to its ranks", time.monotonic() + self._grace
            while not self.poll():
                pass
        if postmortem.is_only_lost_peers(self.run, failed):  # another rank failed, and is not reaped yet
            failed = {**failed, **self._reap_within(SECONDS_FOR_LOST_RANK)}
            late = postmortem.find_timed_out_rank(self.run, failed)
            if (
                late is not None
                and (hung := self._hang_detector.find_awaited_rank(self.running_pids, late)) is not None
            ):
                self.kill()
                return hung
        well = [r.rank for r in self._ranks if r.code == 0]
        error = postmortem.find_first_failure(self.run, self.size, failed, well, kills_before=self._kills_before)
        for rank in self._ranks:
            if rank.process is not None and rank.alive:
                send_signal_to_group(rank.process, signal.SIGTERM)
        self._reap_within(SECONDS_TO_END)
        self.kill()
        return error

    def _reap_within(self, seconds: float) -> dict[int, int]:
        """Wait at most this many seconds for the ranks that still run; return the codes of those that failed."""
        until = time.monotonic() + seconds
        failed: dict[int, int] = {}
        while self.running_pids and (left := until - time.monotonic()) > 0:
            failed |= self._handle_events(left)
        return failed

    def _check_stopped(self) -> bool:
        """Return whether all ended with code 0 after a request to stop; raise Stopped if they stopped or are late."""
        saving = end_of_grace_while_saving(self.run, self.running_pids, self._grace)
        self._stop_deadline = max(self._stop_deadline, saving)
        if self.running_pids and time.monotonic() < self._stop_deadline:
            return False
        self.kill()
        if all(rank.code == 0 for rank in self._ranks):
            return True
        raise postmortem.make_stopped_error(self.run, self.size, self._stop_reason)

    def kill(self) -> None:
        """Kill all workers and what they started, and remove their temporary folders."""
        for rank in self._ranks:
            if rank.process is not None and rank.alive:
                send_signal_to_group(rank.process, signal.SIGKILL)
        with ExitStack() as stack:  # an error in one of these calls must not prevent the others
            stack.callback(self._close)
            for rank in self._ranks:
                if rank.alive:
                    stack.callback(self._reap, rank)

    def _close(self) -> None:
        if self._debug_rank is not None:
            debugging_path(self.run).unlink(missing_ok=True)
        if self._terminal_settings:  # a debugger that was killed at its prompt leaves a terminal that does not echo
            with suppress(termios.error):
                termios.tcsetattr(0, termios.TCSADRAIN, self._terminal_settings)
        for rank in self._ranks:
            if rank.control is not None:
                rank.control.close()
            dump = stack_path(self.run, rank.rank)
            if dump.exists() and not dump.stat().st_size:
                dump.unlink()
        if self._parent_alive_fd >= 0:
            _parent_alive_fds.pop(self._parent_alive_fd, None)
            os.close(self._parent_alive_fd)
            self._parent_alive_fd = -1


def build_worker_environment(size: int, more: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment with a share of the cores for each rank, and with the variables in `more`."""
    return {"OMP_NUM_THREADS": str(cores_per_rank(size)), **os.environ, "PYTHONUNBUFFERED": "1", **more}


_parent_alive_fds: weakref.WeakValueDictionary[int, WorkerGroup] = weakref.WeakValueDictionary()
"""Groups by the pipe end whose closing tells their workers that this process has ended."""


def _close_in_fork() -> None:
    """Close the inherited pipe ends in a fork, which must not keep the workers alive."""
    for fd in _parent_alive_fds:
        os.close(fd)


os.register_at_fork(after_in_child=_close_in_fork)
