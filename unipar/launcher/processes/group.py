"""N worker processes of ours on this machine: started together, watched, and ended together."""

from __future__ import annotations

import os
import secrets
import selectors
import shutil
import signal
import socket
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from unipar.backend import Backend
from unipar.config.settled import SettledConfig
from unipar.errors import UniparError, WorkerFailed
from unipar.launcher.processes import postmortem
from unipar.launcher.processes.process import Fresh, Process, Starter, reap, send, send_all
from unipar.launcher.processes.signals import Signals
from unipar.launcher.processes.watchdog import Watch
from unipar.launcher.processes.worker_arguments import Orders
from unipar.run_folder.layout import log_of, stack_of
from unipar.task import pickled
from unipar.utils.procfs import cores_per_rank

ENDING = 3.0
"""Seconds that the others have when one rank has failed."""

ECHO = 1.0
"""Seconds to wait for the rank whose loss another one reports."""

MESSAGE = 1 << 17
"""The longest message to or from a rank, in bytes."""


@dataclass(eq=False)
class _Rank:
    rank: int
    folder: str
    control: socket.socket | None = None
    process: Process | None = None
    code: int | None = None
    words: deque[bytes] = field(default_factory=deque[bytes])

    @property
    def alive(self) -> bool:
        return self.process is not None and self.code is None


class Crew:
    """Enter it to start the workers; when it is left, nothing of them is left."""

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
        parcel: bytes = b"",
        zygote: Starter | None = None,
    ) -> None:
        self.run, self.size = run.resolve(), size
        self._entry, self._environment, self._grace, self._control = entry, environment or {}, grace, control
        self._parcel = parcel
        self._starter: Starter = zygote or Fresh()
        name = f"unipar-{secrets.token_hex(4)}"
        self._ranks = [_Rank(rank, f"{_short_folder()}/{name}-{rank}") for rank in range(size)]
        self._watch = Watch(self.run, heartbeat, waits, timeout)
        self._selector = selectors.DefaultSelector()
        self._lifeline = -1
        self._asked = ""
        self._until = float("inf")

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
        parcel: bytes = b"",
        zygote: Starter | None = None,
    ) -> Self:
        """Return the workers of a settled config, watched as its `launch` section says."""
        said = settled.config.launch
        return cls(
            run,
            settled.ranks,
            entry,
            environment=environment,
            heartbeat=said.heartbeat,
            timeout=said.timeout,
            grace=said.grace,
            control=control,
            waits=backend.capabilities.waits,
            parcel=parcel,
            zygote=zygote,
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
        mortal = int(threading.current_thread() is threading.main_thread())  # the signal follows the thread
        environment = worker_environment(self.size, self._environment)
        with ExitStack() as passed:  # what workers have of their own once they are started
            reader, self._lifeline = os.pipe2(os.O_CLOEXEC)
            passed.callback(os.close, reader)
            _lifelines[self._lifeline] = self
            listener = passed.enter_context(_listening(self.size)) if self.size > 1 else None
            pipes: list[int] = []
            for rank in self._ranks:
                theirs = self._pair(rank, passed)
                log = os.open(log_of(self.run, rank.rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
                passed.callback(os.close, log)
                orders = Orders(
                    rank=rank.rank,
                    size=self.size,
                    parent=self._starter.pid,
                    mortal=mortal,
                    lifeline=reader,
                    listener=listener.fileno() if listener and rank.rank == 0 else -1,
                    port=listener.getsockname()[1] if listener else 0,
                    control=theirs,
                    parcel=self._pipe(pipes, passed),
                    run=str(self.run),
                    entry=self._entry,
                    folder=rank.folder,
                )
                rank.process = self._starter.start(orders, environment, log)
                self._selector.register(rank.process.pidfd, selectors.EVENT_READ, rank)
            if pipes:
                pickled.send(self._parcel, pipes)

    def _pipe(self, pipes: list[int], passed: ExitStack) -> int:
        """The worker's end of a pipe that will bring what has no file, or -1."""
        if not self._parcel:
            return -1
        reader, writer = os.pipe2(os.O_CLOEXEC)
        passed.callback(os.close, reader)
        pipes.append(writer)
        return reader

    def _pair(self, rank: _Rank, passed: ExitStack) -> int:
        """The worker's end of its control socket, or -1."""
        if not self._control:
            return -1
        rank.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        passed.enter_context(theirs)
        self._selector.register(rank.control, selectors.EVENT_READ, rank)
        return theirs.fileno()

    @property
    def pids(self) -> dict[int, int]:
        """Of the ranks that still run."""
        return {r.rank: r.process.pid for r in self._ranks if r.process is not None and r.alive}

    def wait(self, tick: Callable[[], None] | None = None, every: float = 0.1) -> None:
        """Until all have ended well. SIGINT and SIGTERM ask them to stop; a second one ends them at once."""
        with Signals() as signals:
            self._selector.register(signals, selectors.EVENT_READ)
            try:
                while not self.poll(every if tick else None):
                    signals.drain()
                    if len(signals.taken) > 1:
                        self.kill()
                        raise postmortem.halted(self.run, self.size, signals.taken[0].name)
                    if signals.taken and not self._asked:
                        self.stop(signals.taken[0].name)
                    if tick:
                        tick()
            finally:
                self._selector.unregister(signals)

    def poll(self, timeout: float | None = None) -> bool:
        """Watch until something happens, for at most `timeout` seconds; whether all have ended well."""
        failed = self._look(self._patience(timeout))
        if self._asked:
            if failed and not all(postmortem.stopped(self.run, rank) for rank in failed):
                self._until = min(self._until, time.monotonic() + ENDING)  # it will not reach a boundary any more
            return self._stopping()
        if failed:
            raise self._fail(failed)
        hung = self._watch.look(self.pids)
        if hung is not None:
            self.kill()
            raise hung
        return not self.pids

    def stop(self, why: str) -> None:
        """Ask all ranks to stop at the next step boundary; `poll` and `wait` raise Stopped when they have."""
        self._asked = why
        self._until = time.monotonic() + self._grace
        for rank in self._ranks:
            if rank.process is not None and rank.alive:
                send(rank.process, signal.SIGTERM)

    def tell(self, data: bytes) -> None:
        """To every rank's control socket; a rank that is gone hears nothing."""
        for rank in self._ranks:
            assert rank.control is not None
            try:
                rank.control.send(data)
            except (BrokenPipeError, ConnectionResetError):
                continue

    def hear(self, timeout: float | None = None) -> list[bytes]:
        """The next message of each rank; TimeoutError when one has said nothing for so long."""
        until = time.monotonic() + timeout if timeout is not None else float("inf")
        while not all(rank.words for rank in self._ranks):
            mute = [rank for rank in self._ranks if not rank.words and not rank.alive]
            if mute:
                gone, log = mute[0].rank, str(log_of(self.run, mute[0].rank))
                raise WorkerFailed(f"rank {gone} ended without a word\n  its log: {log}", rank=gone, log=log)
            left = until - time.monotonic()
            if left <= 0:
                silent = ", ".join(str(rank.rank) for rank in self._ranks if not rank.words)
                raise TimeoutError(f"no word from rank {silent} for {timeout:g} s")
            self.poll(None if left == float("inf") else left)
        return [rank.words.popleft() for rank in self._ranks]

    def _patience(self, timeout: float | None) -> float | None:
        waits = [w for w in (timeout, self._watch.every) if w is not None]
        if self._asked:
            waits.append(max(0.0, self._until - time.monotonic()))
        return min(waits, default=None)

    def _look(self, timeout: float | None) -> dict[int, int]:
        """What happened: messages are kept, ranks that ended are reaped; those that ended badly, with their codes."""
        if not self.pids:
            return {}
        failed: dict[int, int] = {}
        events = self._selector.select(timeout)
        for key, _ in events:
            rank = key.data
            if isinstance(rank, _Rank) and rank.control is not None and key.fileobj is rank.control:
                self._receive(rank)
        for key, _ in events:
            rank = key.data
            ended = isinstance(rank, _Rank) and rank.process is not None and key.fileobj == rank.process.pidfd
            if ended and (code := self._reap(rank)):
                failed[rank.rank] = code
        return failed

    def _receive(self, rank: _Rank) -> None:
        assert rank.control is not None
        try:
            said = rank.control.recv(MESSAGE, socket.MSG_DONTWAIT)
        except ConnectionResetError:
            said = b""
        if said:
            rank.words.append(said)
        else:
            self._selector.unregister(rank.control)

    def _reap(self, rank: _Rank) -> int:
        assert rank.process is not None
        self._selector.unregister(rank.process.pidfd)
        rank.code = -signal.SIGKILL  # where nobody can tell
        try:
            rank.code = reap(rank.process)
        finally:
            shutil.rmtree(rank.folder, ignore_errors=True)
        return rank.code

    def _fail(self, failed: Mapping[int, int]) -> UniparError:
        """End the others and say who failed first."""
        if all(postmortem.stopped(self.run, rank) for rank in failed):  # a signal came to the ranks, not to us
            self._asked, self._until = "a signal to its ranks", time.monotonic() + self._grace
            while not self.poll():
                pass
        if postmortem.is_echo(self.run, failed):  # another one failed, and has not said so yet
            failed = {**failed, **self._gather(ECHO)}
            late = postmortem.late(self.run, failed)
            if late is not None and (hung := self._watch.blame(self.pids, late)) is not None:
                self.kill()
                return hung
        well = [r.rank for r in self._ranks if r.code == 0]
        error = postmortem.verdict(self.run, self.size, failed, well)
        for rank in self._ranks:
            if rank.process is not None and rank.alive:
                send_all(rank.process, signal.SIGTERM)
        self._gather(ENDING)
        self.kill()
        return error

    def _gather(self, seconds: float) -> dict[int, int]:
        """Wait for the ends of those that still run; the bad ones."""
        until = time.monotonic() + seconds
        failed: dict[int, int] = {}
        while self.pids and (left := until - time.monotonic()) > 0:
            failed |= self._look(left)
        return failed

    def _stopping(self) -> bool:
        """After we asked: whether all ended well all the same; Stopped when they stopped or would not."""
        if self.pids and time.monotonic() < self._until:
            return False
        self.kill()
        if all(rank.code == 0 for rank in self._ranks):
            return True
        raise postmortem.halted(self.run, self.size, self._asked)

    def kill(self) -> None:
        """End everything now; leave nothing."""
        for rank in self._ranks:
            if rank.process is not None and rank.alive:
                send_all(rank.process, signal.SIGKILL)
        with ExitStack() as stack:  # all of it, whatever fails on the way
            stack.callback(self._close)
            for rank in self._ranks:
                if rank.alive:
                    stack.callback(self._reap, rank)

    def _close(self) -> None:
        for rank in self._ranks:
            if rank.control is not None:
                rank.control.close()
            dump = stack_of(self.run, rank.rank)
            if dump.exists() and not dump.stat().st_size:
                dump.unlink()
        if self._lifeline >= 0:
            _lifelines.pop(self._lifeline, None)
            os.close(self._lifeline)
            self._lifeline = -1


def worker_environment(size: int, more: Mapping[str, str]) -> dict[str, str]:
    """This process's own, with a fair share of the cores, and whatever the backend's host gives."""
    return {"OMP_NUM_THREADS": str(cores_per_rank(size)), **os.environ, "PYTHONUNBUFFERED": "1", **more}


def _listening(size: int) -> socket.socket:
    """Made here, so that the port is known before any rank runs, and nobody can take it."""
    return socket.create_server(("127.0.0.1", 0), backlog=max(128, size))


def _short_folder() -> str:
    """Paths of sockets end at 108 bytes."""
    usual = tempfile.gettempdir()
    return usual if len(usual) <= 40 else "/tmp"


_lifelines: weakref.WeakValueDictionary[int, Crew] = weakref.WeakValueDictionary()


def _forked() -> None:
    """A fork of this process must not keep the workers alive."""
    for fd in _lifelines:
        os.close(fd)


os.register_at_fork(after_in_child=_forked)
