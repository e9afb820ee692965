"""Fork server: a process that has imported torch and forks workers from itself, so a world starts in 0.1 s.

Forks can measure their memory: allocations count from a base mark on, and so do resident pages that are not the
server's (`procfs.shared_bytes`).
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Final, NoReturn, Self, final

from typing_extensions import override

from unipar.distributed.addresses import LOOPBACK
from unipar.errors import UniparError
from unipar.launcher.processes import script_fork
from unipar.launcher.processes.process import WorkerProcess, WorkerStarter
from unipar.launcher.processes.worker_arguments import WorkerArguments, die_with_parent
from unipar.training.stopping import STOP_SIGNALS
from unipar.utils import procfs

FORK_MESSAGE_BYTES = 1 << 17
_MOST_CHARACTERS: Final = FORK_MESSAGE_BYTES // 16
"""Characters of an error in a message, from its end; JSON may take twelve bytes for one."""

_SERVER_ENVIRONMENT: Final = {
    # one thread while it imports: a fork takes one thread along, and libraries start theirs by this number
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
    # libraries ask at import whether there is a GPU; torch would start CUDA for the answer, and a fork could not use it
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
_FD_FIELDS = ("parent_alive_fd", "listener", "control", "pickled_task_fd", "terminal")


def _server_environment() -> dict[str, str]:
    """Return the variables with which libraries are imported.

    `torch._dynamo` makes the folder of its cache: one that exists, so that nothing is left. Forks choose their own.
    """
    cache = "TORCHINDUCTOR_CACHE_DIR"
    return {cache: os.environ.get(cache, tempfile.gettempdir()), **_SERVER_ENVIRONMENT}


class ForkServerFailed(UniparError):
    """Error of the fork server: a module cannot be imported, or the process has ended."""

    def __init__(self, message: str, module: str = "") -> None:
        super().__init__(message)
        self.module = module
        """Module that could not be imported there; empty if another reason is known."""


@final
class ForkServer(WorkerStarter):
    """Starter that forks workers from one process; a context manager: `WorkerGroup(..., starter=server)`.

    The imports begin when it is entered, and it waits for them when the first worker is started.
    """

    def __init__(
        self, modules: Sequence[str], environment: Mapping[str, str] | None = None, *, of_this_process: bool = False
    ) -> None:
        """Prepare a server that imports `modules`.

        `of_this_process`: it is a fork of this process, with what is imported here, and not a new interpreter.
        """
        self._modules, self._environment = list(modules), environment or {}
        self._of_this_process = of_this_process
        self._lock = threading.Lock()
        self._unanswered = 0

    def __enter__(self) -> Self:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = self._fork_here(theirs) if self._of_this_process else self._run_interpreter(theirs)
        self._request_imports(self._modules)
        return self

    def _run_interpreter(self, theirs: socket.socket) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "unipar.launcher.processes.forkserver", *self._words(theirs)],
            env={**os.environ, **self._environment, **_server_environment()},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )

    def _fork_here(self, theirs: socket.socket) -> script_fork.ForkOfThisProcess:
        words = self._words(theirs)

        def serve() -> None:
            self._socket.close()  # the parent's end, whose closing says that the parent needs no more workers
            run_fork_server(words)

        fork = script_fork.ForkOfThisProcess(serve, {**self._environment, **_server_environment()})
        if fork.threads_left_behind:
            fork.kill()
            fork.wait()
            self._socket.close()
            raise ForkServerFailed("this process has threads that a fork would leave behind")
        return fork

    def _words(self, theirs: socket.socket) -> list[str]:
        mortal = threading.current_thread() is threading.main_thread()
        return [str(theirs.fileno()), str(os.getpid()), str(int(mortal))]

    def __exit__(self, *_: object) -> None:
        self._socket.close()  # the server exits when its socket is closed ...
        if self._unanswered:
            self._process.kill()  # ... which it sees only after its imports
        self._process.wait()

    @property
    @override
    def host(self) -> str:
        return LOOPBACK

    @property
    @override
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the server has not ended."""
        return self._process.poll() is None

    def import_modules(self, modules: Sequence[str]) -> None:
        """Import more modules, before workers are started; `wait_until_ready` raises an error of theirs."""
        self._modules += modules
        self._request_imports(modules)

    def wait_until_ready(self, seconds: float | None = None) -> bool:
        """Wait until everything is imported, for at most this many seconds; return whether it is."""
        until = None if seconds is None else time.monotonic() + seconds
        with self._lock:
            while self._unanswered:
                left = None if until is None else max(0.0, until - time.monotonic())
                if not select.select([self._socket], [], [], left)[0]:
                    return False
                self._unanswered -= 1
                self._answer()
        return True

    @override
    def start(self, arguments: WorkerArguments, environment: Mapping[str, str], log: int) -> WorkerProcess:
        self.wait_until_ready()
        fds = [fd for name in _FD_FIELDS if (fd := getattr(arguments, name)) >= 0]
        request = {"arguments": asdict(arguments), "environment": dict(environment), "folder": os.getcwd()}
        reply, passed = self._ask(request, [log, *fds])
        return _ForkedWorker(reply["pid"], passed[0], self)

    def reap(self, pid: int) -> int:
        """Return the exit code of a fork that has ended."""
        return self._ask({"reap": pid})[0]["code"]

    def _request_imports(self, modules: Sequence[str]) -> None:
        with self._lock:
            self._send({"import": list(modules)})
            self._unanswered += 1

    def _ask(self, question: dict[str, Any], fds: Sequence[int] = ()) -> tuple[dict[str, Any], list[int]]:
        with self._lock:
            self._send(question, fds)
            return self._answer()

    def _send(self, question: dict[str, Any], fds: Sequence[int] = ()) -> None:
        try:
            socket.send_fds(self._socket, [json.dumps(question).encode()], fds)
        except (BrokenPipeError, ConnectionResetError):
            raise self._ended() from None

    def _answer(self) -> tuple[dict[str, Any], list[int]]:
        try:
            raw, fds, _, _ = socket.recv_fds(self._socket, FORK_MESSAGE_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
        except ConnectionResetError:  # the server ended before it had read the question
            raw, fds = b"", list[int]()
        if not raw:
            raise self._ended()
        reply = json.loads(raw)
        if "error" in reply:
            names = ", ".join(self._modules)
            raise ForkServerFailed(f"the fork server of {names} failed: {reply['error']}", reply.get("module", ""))
        return reply, fds

    def _ended(self) -> ForkServerFailed:
        return ForkServerFailed(f"the fork server has ended (exit code {self._process.wait()})")


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
    """Answer requests to import, to fork and to reap, until the socket is closed."""
    die_with_parent(int(words[1]), signal.SIGKILL if words[2] == "1" else None)
    connection = socket.socket(fileno=int(words[0]))
    connection.set_inheritable(False)
    for number in STOP_SIGNALS:  # a scheduler sends them to all processes of a job, and ranks need this one to the end
        _handlers[number] = signal.signal(number, signal.SIG_IGN)
    while True:
        raw, fds, _, _ = socket.recv_fds(connection, FORK_MESSAGE_BYTES, 1 + len(_FD_FIELDS), socket.MSG_CMSG_CLOEXEC)
        if not raw:
            os._exit(0)
        try:
            _handle_request(connection, json.loads(raw), list(fds))
        except Exception:
            _send_reply(connection, {"error": traceback.format_exc()[-_MOST_CHARACTERS:]})
        finally:
            for fd in fds:
                os.close(fd)


_handlers: dict[signal.Signals, Any] = {}
"""Handlers of STOP_SIGNALS that workers have, and this process has not."""


def _import_modules(connection: socket.socket, modules: Sequence[str]) -> None:
    """Import the modules; end this process if one cannot be imported, or starts threads."""
    module = ""
    try:
        for module in ["unipar.launcher.processes.worker", *modules]:
            importlib.import_module(module)
            _require_single_thread()
        gc.freeze()  # the forks' garbage collector does not touch these pages: they stay shared, and collecting is fast
        _send_reply(connection, {"ready": True})
    except BaseException:
        _send_reply(connection, {"error": traceback.format_exc()[-_MOST_CHARACTERS:], "module": module})
        os._exit(1)


def _handle_request(connection: socket.socket, request: dict[str, Any], fds: list[int]) -> None:
    if "import" in request:
        _import_modules(connection, request["import"])
        return
    if "reap" in request:
        _, status = os.waitpid(request["reap"], 0)
        _send_reply(connection, {"code": os.waitstatus_to_exitcode(status)})
        return
    log, *rest = fds
    arguments = WorkerArguments(**request["arguments"])
    names = [name for name in _FD_FIELDS if getattr(arguments, name) >= 0]
    arguments = replace(arguments, **dict(zip(names, rest, strict=True)))
    _require_single_thread()
    pid = os.fork()
    if pid == 0:
        _become_worker(connection, arguments, request, log)
    pidfd = os.pidfd_open(pid)
    try:
        _send_reply(connection, {"pid": pid}, [pidfd])
    finally:
        os.close(pidfd)


def _require_single_thread() -> None:
    """Raise if this process has several threads: a fork has only one of them, and locks of the others stay locked."""
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        raise RuntimeError(f"{threads} threads; a module that starts threads must be imported in the workers")


def _send_reply(connection: socket.socket, reply: dict[str, Any], fds: Sequence[int] = ()) -> None:
    """Send one message, which must not be longer than FORK_MESSAGE_BYTES, with open files."""
    socket.send_fds(connection, [json.dumps(reply).encode()], fds)


def _become_worker(
    connection: socket.socket, arguments: WorkerArguments, request: dict[str, Any], log: int
) -> NoReturn:
    """Turn this fork into a worker: session, output, environment and folder as a new process would have them."""
    os.setsid()
    for number, handler in _handlers.items():
        signal.signal(number, signal.SIG_DFL if handler is None else handler)
    connection.close()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    procfs.note_fork()
    if "torch" in sys.modules:  # torch reads OMP_NUM_THREADS only when it is imported
        sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    from unipar.launcher.processes import worker

    worker.run_worker(arguments)


if __name__ == "__main__":
    run_fork_server(sys.argv[1:])
