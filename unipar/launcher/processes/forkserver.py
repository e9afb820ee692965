"""Fork server: a process that has imported torch and forks workers from itself, so a world starts in 0.1 s.

It is meant for many short worlds: tests, comparisons of numbers. If memory is measured, workers must be new processes:
the pages that a fork shares with its parent count as the fork's own.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, NoReturn, Self, final

from typing_extensions import override

from unipar.errors import UniparError
from unipar.launcher.processes.process import WorkerProcess, WorkerStarter
from unipar.launcher.processes.worker_arguments import WorkerArguments, die_with_parent

FORK_MESSAGE_BYTES = 1 << 17
_SERVER_ENVIRONMENT = {
    # one thread while it imports: a fork takes one thread along, and libraries start theirs by this number
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
    # libraries ask at import whether there is a GPU; torch would start CUDA for the answer, and a fork could not use it
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
_FD_FIELDS = ("parent_alive_fd", "listener", "control", "pickled_task_fd")


class ForkServerFailed(UniparError):
    """Error of the fork server: a module cannot be imported, or the process has ended."""


@final
class ForkServer(WorkerStarter):
    """Starter that forks workers from one process; a context manager: `WorkerGroup(..., starter=server)`."""

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self._modules, self._environment = modules, environment or {}
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        mortal = threading.current_thread() is threading.main_thread()
        words = [str(theirs.fileno()), str(os.getpid()), str(int(mortal)), *self._modules]
        with theirs:
            self._popen = subprocess.Popen(
                [sys.executable, "-P", "-m", "unipar.launcher.processes.forkserver", *words],
                env={**os.environ, **self._environment, **_SERVER_ENVIRONMENT},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        try:
            self._answer()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()  # the server exits when its socket is closed
        self._popen.wait()

    @property
    @override
    def pid(self) -> int:
        return self._popen.pid

    @override
    def start(self, arguments: WorkerArguments, environment: Mapping[str, str], log: int) -> WorkerProcess:
        fds = [fd for name in _FD_FIELDS if (fd := getattr(arguments, name)) >= 0]
        request = {"arguments": asdict(arguments), "environment": dict(environment), "folder": os.getcwd()}
        reply, passed = self._ask(request, [log, *fds])
        return _ForkedWorker(reply["pid"], passed[0], self)

    def reap(self, pid: int) -> int:
        """Return the exit code of a fork that has ended."""
        return self._ask({"reap": pid})[0]["code"]

    def _ask(self, question: dict[str, Any], fds: Sequence[int] = ()) -> tuple[dict[str, Any], list[int]]:
        with self._lock:
            try:
                socket.send_fds(self._socket, [json.dumps(question).encode()], fds)
            except (BrokenPipeError, ConnectionResetError):
                raise self._ended() from None
            return self._answer()

    def _answer(self) -> tuple[dict[str, Any], list[int]]:
        try:
            raw, fds, _, _ = socket.recv_fds(self._socket, FORK_MESSAGE_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
        except ConnectionResetError:  # the server ended before it had read the question
            raw, fds = b"", list[int]()
        if not raw:
            raise self._ended()
        reply = json.loads(raw)
        if "error" in reply:
            raise ForkServerFailed(f"the fork server of {', '.join(self._modules)} failed: {reply['error']}")
        return reply, fds

    def _ended(self) -> ForkServerFailed:
        return ForkServerFailed(f"the fork server has ended (exit code {self._popen.wait()})")


@final
class _ForkedWorker(WorkerProcess):
    """Worker that the fork server has forked."""

    def __init__(self, pid: int, pidfd: int, server: ForkServer) -> None:
        self._pid, self._pidfd, self._fork_server = pid, pidfd, server

    @property
    @override
    def pid(self) -> int:
        return self._pid

    @property
    @override
    def pidfd(self) -> int:
        return self._pidfd

    @override
    def reap(self) -> int:
        return self._fork_server.reap(self._pid)


# In the server's own process


def run_fork_server(words: list[str]) -> NoReturn:
    """Import the modules, then answer requests to fork and to reap until the socket is closed."""
    die_with_parent(int(words[1]), signal.SIGKILL if words[2] == "1" else None)
    connection = socket.socket(fileno=int(words[0]))
    connection.set_inheritable(False)
    try:
        for module in ["unipar.launcher.processes.worker", *words[3:]]:
            importlib.import_module(module)
        _send_reply(connection, {"ready": _require_single_thread()})
    except BaseException:
        _send_reply(connection, {"error": traceback.format_exc()})
        os._exit(1)
    gc.freeze()  # the forks' garbage collector does not touch these pages: they stay shared, and collecting is fast
    while True:
        raw, fds, _, _ = socket.recv_fds(connection, FORK_MESSAGE_BYTES, 1 + len(_FD_FIELDS), socket.MSG_CMSG_CLOEXEC)
        if not raw:
            os._exit(0)
        try:
            _handle_request(connection, json.loads(raw), list(fds))
        except Exception:
            _send_reply(connection, {"error": traceback.format_exc()})
        finally:
            for fd in fds:
                os.close(fd)


def _handle_request(connection: socket.socket, request: dict[str, Any], fds: list[int]) -> None:
    if "reap" in request:
        _, status = os.waitpid(request["reap"], 0)
        _send_reply(connection, {"code": os.waitstatus_to_exitcode(status)})
        return
    log, *rest = fds
    arguments = WorkerArguments(**request["arguments"])
    given = [name for name in _FD_FIELDS if getattr(arguments, name) >= 0]
    arguments = replace(arguments, **dict(zip(given, rest, strict=True)))
    _require_single_thread()
    pid = os.fork()
    if pid == 0:
        _become_worker(connection, arguments, request, log)
    pidfd = os.pidfd_open(pid)
    try:
        _send_reply(connection, {"pid": pid}, [pidfd])
    finally:
        os.close(pidfd)


def _require_single_thread() -> int:
    """Raise if this process has several threads: a fork has only one of them, and locks of the others stay locked."""
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        raise RuntimeError(f"{threads} threads; a module that starts threads must be imported in the workers")
    return threads


def _send_reply(connection: socket.socket, what: dict[str, Any], fds: Sequence[int] = ()) -> None:
    socket.send_fds(connection, [json.dumps(what).encode()[:FORK_MESSAGE_BYTES]], fds)


def _become_worker(
    connection: socket.socket, arguments: WorkerArguments, request: dict[str, Any], log: int
) -> NoReturn:
    """Turn this fork into a worker: session, output, environment and folder as a new process would have them."""
    os.setsid()
    connection.close()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    if "torch" in sys.modules:  # torch reads OMP_NUM_THREADS only when it is imported
        sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    from unipar.launcher.processes import worker

    worker.run_worker(arguments)


if __name__ == "__main__":
    run_fork_server(sys.argv[1:])
