"""Workers for tests, forked from one process that has imported all libraries: a world without its seconds of imports.

What a worker is asked to do is the same; tests of how new interpreters start do without.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self, final

import pytest
from typing_extensions import override

from unipar.backend import registry
from unipar.distributed.addresses import LOOPBACK
from unipar.distributed.place import Place
from unipar.launcher.processes import early, group, starters
from unipar.launcher.processes.forkserver import ForkServer
from unipar.launcher.processes.process import SubprocessStarter, WorkerProcess, WorkerStarter, reap_process
from unipar.launcher.processes.worker_arguments import WorkerArguments
from unipar.memory.sources import malloc_build
from unipar.memory.sources.malloc_build import METER_ENVIRONMENT

ROOT = Path(__file__).parents[2]
BACKENDS = ("native", "deepspeed", "horovod", "accelerate")
ENTRY = "UNIPAR_TESTS_ENTRY"
BEGUN = {"TMPDIR": os.environ.get("TMPDIR", "/tmp"), "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
"""This process's own, before any test changes it."""

TRACED = ("torch._dynamo.backends.inductor", "torch._inductor.compile_fx", "torch.distributed.tensor.experimental")
RUNS = (
    "unipar.training.setup",
    "unipar.memory.recording.watcher",
    "unipar.comparison.comparison_worker",
    "unipar.verification.worker.entry",
)
MODELS = (
    "transformers.models.gpt2.modeling_gpt2",
    "torchmetrics.classification",
    "sklearn.metrics",
    "sklearn.datasets",
)
"""Modules that tasks of tests import, which takes as long as torch."""

OURS = ("tests.support.python_fork", "unipar.cli.app", "unipar.launcher.launched_run")
PYTEST_WORDS = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore:Module already imported")
"""A pytest in a fork, where modules are that it would rewrite."""

LENT: list[tuple[Mapping[str, str], ForkServer]] = []
"""Servers of the test that started this process as a fork (tests/support/python_fork.py)."""

SETTINGS = ("LD_PRELOAD", *METER_ENVIRONMENT)
"""What a process has from its start or never."""


def modules(*, metered: bool) -> list[str]:
    """Return what takes long to import: torch, and the engines of all backends that are installed.

    Where memory is counted nothing is compiled, Accelerate is rare, and models are small ones of ours.
    """
    here = [name for name in BACKENDS if registry.why_not_installed(registry.find_backend(name)) is None]
    engines = [f"unipar_{name}.engine" for name in here if not (metered and name == "accelerate")]
    rest = () if metered else (*TRACED, *MODELS)
    return ["torch", "torch._dynamo", "torch.distributed.fsdp", *rest, *RUNS, *OURS, *engines, "tests.support.warm"]


@final
class Forks(WorkerStarter):
    """Starts workers as forks; those that begin with other settings than there are servers for, as new interpreters."""

    def __init__(
        self,
        servers: Sequence[tuple[Mapping[str, str], ForkServer]] = (),
        environment: Mapping[str, str] | None = None,
        without: Sequence[str] = (),
    ) -> None:
        """Prepare servers that start with `environment` besides this process's, as commands do.

        `servers`: started already, each with its settings; others are started when they are asked for. `without`:
        modules that they do not import.
        """
        self._servers, self._environment, self._without = list(servers), environment or {}, without
        self._open = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    @property
    def plain(self) -> ForkServer:
        """The server of workers whose memory is not counted."""
        return self._server({})

    @property
    def metered(self) -> ForkServer:
        """The server of workers whose memory is counted."""
        return self._server(metered_environment())

    def _server(self, settings: Mapping[str, str]) -> ForkServer:
        """Return the server with these settings; it is started when it is first asked for."""
        for known, server in self._servers:
            if known == settings:
                return server
        path = os.pathsep.join(filter(None, [str(ROOT), BEGUN["PYTHONPATH"]]))
        begun = {**BEGUN, **settings, "PYTHONPATH": path, **self._environment}
        names = [name for name in modules(metered=bool(settings)) if name not in self._without]
        made = self._open.enter_context(ForkServer(names, begun))
        made.wait_until_ready()  # other processes may ask it over the same socket
        self._servers.append((settings, made))
        return made

    @property
    @override
    def host(self) -> str:
        return LOOPBACK

    @property
    @override
    def pid(self) -> int:
        return os.getpid()  # `start` says which server's it is

    running = True

    def import_modules(self, modules: Sequence[str]) -> None:
        """Import no more than is imported."""

    def wait_until_ready(self, seconds: float | None = None) -> bool:
        """Return True: a server is started when the first worker is."""
        return True

    @override
    def start(self, arguments: WorkerArguments, environment: Mapping[str, str], log: int) -> WorkerProcess:
        settings = {name: environment[name] for name in SETTINGS if environment.get(name)}
        metered = metered_environment()
        if settings == {"LD_PRELOAD": metered.get("LD_PRELOAD")}:  # of log.memory: malloc keeps what is freed, there
            settings = metered
        if settings == METER_ENVIRONMENT:  # no block is counted: how malloc works makes no difference
            settings = {}
        if settings and settings != metered:
            return SubprocessStarter().start(replace(arguments, parent=os.getpid()), environment, log)
        server = self._server(settings)
        told = {**environment, ENTRY: arguments.entry}
        return server.start(replace(arguments, parent=server.pid, entry="tests.support.forks:enter"), told, log)

    @contextmanager
    def instead(self) -> Generator[None]:
        """Have worker groups in the body start their workers here, and commands start no fork servers."""
        with _started_by(lambda: self, self._as_server):
            yield

    def _as_server(
        self, modules: Sequence[str], environment: Mapping[str, str] | None = None, *, of_this_process: bool = False
    ) -> AbstractContextManager[WorkerStarter]:
        return nullcontext(self)

    def unipar(
        self, words: Sequence[str], environment: Mapping[str, str] | None = None, *, memory: bool = False
    ) -> subprocess.CompletedProcess[str]:
        """Run `unipar WORDS...` in a process of its own, to its end; `memory`: its workers are counted."""
        return self.python(["-m", "unipar", *words], ROOT, environment, memory=memory)

    def python(
        self,
        words: Sequence[str],
        folder: Path,
        environment: Mapping[str, str] | None = None,
        *,
        memory: bool = False,
        timeout: float = 300.0,
    ) -> subprocess.CompletedProcess[str]:
        """Run `python WORDS...` from this folder to its end, as a fork whose workers are forks, too."""
        with self.begin(words, folder, environment, memory=memory) as process:
            return process.wait(timeout)

    @contextmanager
    def begin(
        self,
        words: Sequence[str],
        folder: Path,
        environment: Mapping[str, str] | None = None,
        *,
        memory: bool = False,
    ) -> Generator[ForkedPython]:
        """`python WORDS...` as `python` runs it, while the body watches it; it ends with the body.

        Until then no other worker of this test is started.
        """
        plain, metered = self.plain, self.metered if memory else None
        told = {"OMP_NUM_THREADS": "1", **os.environ, **self._environment, **(environment or {})}
        command = {"words": list(words), "folder": str(folder), "environment": told, "plain": plain.pid}
        with tempfile.TemporaryDirectory(dir=BEGUN["TMPDIR"]) as temporary, _pipe() as alive:
            run = Path(temporary)
            (run / "command.json").write_text(json.dumps(command | {"metered": metered and metered.pid}), "utf-8")
            arguments = WorkerArguments(
                rank=0,
                size=1,
                local_rank=0,
                local_size=1,
                parent=plain.pid,
                dies_with_thread=0,
                parent_alive_fd=alive,
                listener=-1 if metered is None else connection_of(metered).fileno(),
                control=connection_of(plain).fileno(),
                run=str(run),
                entry="tests.support.python_fork:begin",
                folder=str(run / "own"),
            )
            with (run / "log").open("wb") as log:
                process = ForkedPython(list(words), plain.start(arguments, told, log.fileno()), run)
            try:
                yield process
            finally:
                process.end()

    def ranks(
        self,
        words: Sequence[str],
        folder: Path,
        environment: Mapping[str, str] | None = None,
        *,
        size: int = 2,
        timeout: float = 60.0,
    ) -> list[subprocess.CompletedProcess[str]]:
        """Run `python WORDS...` as two ranks, or more, to their end, with the variables that torchrun would set."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])
        world = {
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        world |= {"TORCHELASTIC_RUN_ID": "tests", "PYTHONPATH": str(ROOT), **(environment or {})}
        with ExitStack() as open_until_all_end:
            ranks = [
                open_until_all_end.enter_context(
                    self.begin(words, folder, world | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
                )
                for rank in range(size)
            ]
            return [process.wait(timeout) for process in ranks]


@final
class ForkedPython:
    """A `python` that is a fork, as `Popen` is one that is not."""

    def __init__(self, words: list[str], process: WorkerProcess, run: Path) -> None:
        self._words, self._process, self._run = words, process, run
        self._code: int | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def stderr(self) -> str:
        """Text that the command has printed to stderr so far."""
        return self._printed("stderr")

    def wait(self, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Return its exit code and what it printed."""
        ended, _, _ = select.select([self._process.pidfd], [], [], timeout)
        self.end()
        out, err = self._printed("stdout"), self._printed("stderr") + self._printed("log")
        if not ended:
            raise subprocess.TimeoutExpired(self._words, timeout, out, err)
        assert self._code is not None
        return subprocess.CompletedProcess(self._words, self._code, out, err)

    def _printed(self, name: str) -> str:
        file = self._run / name
        return file.read_text("utf-8") if file.exists() else ""

    def end(self) -> None:
        """Kill it, and what it has left running."""
        if self._code is None:
            self._code = reap_process(self._process)


@cache
def metered_environment() -> Mapping[str, str]:
    """Return what a process whose memory is counted begins with; empty where there is no compiler."""
    try:
        return malloc_build.preload_environment(malloc_build.build_meter())
    except malloc_build.MeterUnavailable:
        return {}


@contextmanager
def without_forks() -> Generator[None]:
    """Context manager: workers start as they do for users, within `Forks.instead`, too."""
    with _started_by(SubprocessStarter, ForkServer):
        yield


@contextmanager
def _started_by(starter: Callable[[], WorkerStarter], server: Callable[..., Any]) -> Generator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (group, starters):
            patch.setattr(module, "SubprocessStarter", starter)
        for module in (early, starters):
            patch.setattr(module, "ForkServer", server)
        yield


def connection_of(server: ForkServer) -> socket.socket:
    """Return the socket over which a server is asked."""
    return vars(server)["_socket"]


def server_of(connection: socket.socket, pid: int) -> ForkServer:
    """Return a server that another process has started and will end."""
    server = ForkServer(())
    vars(server).update(_socket=connection, _process=SimpleNamespace(pid=pid, wait=lambda: "it has ended"))
    return server


@contextmanager
def _pipe() -> Generator[int]:
    """The reading end of a pipe whose other end is open in the body."""
    reading, writing = os.pipe()
    try:
        yield reading
    finally:
        os.close(reading)
        os.close(writing)


def enter(place: Place, run: Path, control: socket.socket | None) -> None:
    """Find modules, in the fork, where a new interpreter would, and do what was asked for."""
    find_modules_as_new_interpreters_do()
    module, _, function = os.environ.pop(ENTRY).partition(":")
    getattr(importlib.import_module(module), function)(place, run, control)


def find_modules_as_new_interpreters_do() -> None:
    """Put what PYTHONPATH names now in place of what the server's named."""
    ours = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    servers = BEGUN["PYTHONPATH"].split(os.pathsep)
    sys.path[:] = [*filter(None, ours), *(path for path in sys.path if path not in servers)]
    if {*ours} - {*servers, str(ROOT)}:
        importlib.invalidate_caches()
        registry.find_backend.cache_clear()  # other folders may hold other backends
