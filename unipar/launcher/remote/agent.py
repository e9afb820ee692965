"""Agent of a machine: starts workers there for a command on another machine, and sends back what they write."""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, final

from unipar.distributed.meeting.frames import FramedConnection
from unipar.launcher.processes.process import (
    SubprocessStarter,
    WorkerProcess,
    reap_process,
    send_signal,
    send_signal_to_group,
)
from unipar.launcher.processes.worker_arguments import WorkerArguments
from unipar.memory.sources.malloc_build import MeterUnavailable, build_meter, preload_environment

_SECONDS_BETWEEN_LOOKS: Final = 0.25
"""Seconds between two looks for files that a worker has written."""

_MESSAGE_BYTES: Final = 1 << 17


def serve_workers(listener: socket.socket, word: str) -> None:
    """Start workers for who connects and knows the word, until the first such connection ends.

    The first one is that of the command itself; each further one is of a worker that it wants.
    """
    with listener, ExitStack() as stack:
        commander: FramedConnection | None = None
        while True:
            watched: list[Any] = [listener, *([commander] if commander is not None else [])]
            ready, _, _ = select.select(watched, [], [])
            if commander in ready:
                return
            connection, _ = listener.accept()
            stack.callback(connection.close)
            framed = FramedConnection(connection)
            connection.settimeout(10.0)
            try:
                asked, _ = framed.receive()
            except (OSError, ValueError):
                asked = {}
            connection.settimeout(None)
            if asked.get("word") != word:
                connection.close()
            elif "arguments" in asked:
                threading.Thread(target=_serve_one, args=(framed, asked), name="worker", daemon=True).start()
            else:
                commander = framed


def _serve_one(connection: FramedConnection, request: Mapping[str, Any]) -> None:
    with suppress(OSError, ConnectionError):
        _RemoteWorker(connection, request).serve()
    connection.close()


@final
class _RemoteWorker:
    """One worker, started for a process on another machine that stands for it."""

    def __init__(self, connection: FramedConnection, request: Mapping[str, Any]) -> None:
        self._connection = connection
        self._arguments = WorkerArguments(**request["arguments"])
        self._environment: dict[str, str] = {**os.environ, **request["environment"]}
        self._own_file = re.compile(rf"(?!\.).*\brank-{self._arguments.rank}\..*")
        self._sent: dict[str, bytes | tuple[int, int]] = {}
        self._run = Path(self._arguments.run)

    def serve(self) -> None:
        """Run the worker until it ends, or until the connection does."""
        with ExitStack() as stack:
            self._run = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="unipar-")))
            for name in iter(self._receive_file, ""):
                del name
            self._repair_preload()
            process, control, alive = self._start(stack)
            try:
                code = self._relay(process, control)
            except BaseException:
                send_signal_to_group(process, signal.SIGKILL)
                reap_process(process)
                raise
            finally:
                os.close(alive)
            self._send_files()
            self._connection.send({"exit": code})

    def _receive_file(self) -> str:
        """Write a file that the worker reads; return its name, or "" after the last one."""
        message, content = self._connection.receive()
        if name := message.get("file", ""):
            (self._run / Path(name).name).write_bytes(content)
        return name

    def _repair_preload(self) -> None:
        """Preload this machine's own meter of memory, where that of the other machine is not there."""
        preload = self._environment.get("LD_PRELOAD", "").split()
        if not any("/meter-" in path and not Path(path).exists() for path in preload):
            return
        self._environment.pop("LD_PRELOAD")
        with suppress(MeterUnavailable):
            self._environment |= preload_environment(build_meter())

    def _start(self, stack: ExitStack) -> tuple[WorkerProcess, socket.socket | None, int]:
        reader, alive = os.pipe2(os.O_CLOEXEC)
        stack.callback(os.close, reader)
        control, theirs = None, None
        if self._arguments.control >= 0:
            control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            stack.enter_context(control)
            stack.enter_context(theirs)
        folder = f"{tempfile.gettempdir()}/unipar-{os.getpid()}-{os.urandom(4).hex()}"
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        arguments = replace(
            self._arguments,
            parent=os.getpid(),
            dies_with_thread=0,
            parent_alive_fd=reader,
            listener=-1,
            control=theirs.fileno() if theirs is not None else -1,
            run=str(self._run),
            folder=folder,
        )
        log = os.open(
            self._run / f"rank-{arguments.rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644
        )
        stack.callback(os.close, log)
        return SubprocessStarter().start(arguments, self._environment, log), control, alive

    def _relay(self, process: WorkerProcess, control: socket.socket | None) -> int:
        """Pass on messages, signals and files until the worker has ended; return its exit code."""
        watched: list[Any] = [self._connection, process.pidfd, *([control] if control is not None else [])]
        came = self._connection.messages()  # with the last file
        while True:
            for message, content in came:
                if "signal" in message:
                    send_signal(process, signal.Signals(message["signal"]))
                elif control is not None:
                    with suppress(BrokenPipeError, ConnectionResetError):
                        control.send(content)
            ready, _, _ = select.select(watched, [], [], _SECONDS_BETWEEN_LOOKS)
            if control is not None and control in ready:
                try:
                    received = control.recv(_MESSAGE_BYTES)
                except ConnectionResetError:
                    received = b""
                if received:
                    self._send_files()  # what it has written before it answers is there when the answer is
                    self._connection.send({"control": True}, received)
                else:
                    watched.remove(control)
            if process.pidfd in ready:
                return reap_process(process)
            came = self._connection.receive_all() if self._connection in ready else iter(())
            if not ready:
                self._send_files()

    def _send_files(self) -> None:
        """Send the files of this worker that are new or have changed."""
        for path in sorted(self._run.iterdir()):
            if not self._own_file.fullmatch(path.name):
                continue
            with suppress(FileNotFoundError):
                status = path.stat()
                content = path.read_bytes()
                # a heartbeat is written through memory, which does not change the file's time
                state = content if path.suffix == ".beat" else (status.st_mtime_ns, status.st_size)
                if self._sent.get(path.name) != state:
                    self._sent[path.name] = state
                    self._connection.send({"file": path.name, "now": time.monotonic()}, content)
