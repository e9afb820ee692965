"""Workers for tests, forked from one process that has imported all libraries: a world without its seconds of imports.

    python -m tests.support.forks PLAIN METERED WORDS...    runs `unipar WORDS...`, workers from our servers

What a worker is asked to do is the same; tests of how new interpreters start do without.
"""

from __future__ import annotations

import importlib
import os
import socket
import subprocess
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Self, final

import pytest
from typing_extensions import override

from unipar.backend import registry
from unipar.distributed.place import Place
from unipar.launcher.processes import group
from unipar.launcher.processes.forkserver import ForkServer
from unipar.launcher.processes.process import SubprocessStarter, WorkerProcess, WorkerStarter
from unipar.launcher.processes.worker_arguments import WorkerArguments
from unipar.memory.sources import malloc_build
from unipar.verification import world_pool

ROOT = Path(__file__).parents[2]
BACKENDS = ("native", "deepspeed", "horovod", "accelerate")
ENTRY = "UNIPAR_TESTS_ENTRY"
BEGUN = {"TMPDIR": os.environ.get("TMPDIR", "/tmp"), "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
"""This process's own, before any test changes it."""

TRACED = ("torch._dynamo.backends.inductor", "torch._inductor.compile_fx", "torch.distributed.tensor.experimental")
RUNS = (
    "unipar.training.setup",
    "unipar.memory.recording.watcher",
    "unipar.comparison.worker",
    "unipar.verification.worker.entry",
)
SETTINGS = ("LD_PRELOAD", *malloc_build.METER_ENVIRONMENT)
"""What a process has from its start or never."""


def modules() -> list[str]:
    """Return what takes long to import: torch, and the engines of all backends that are installed."""
    here = [name for name in BACKENDS if registry.why_not_installed(registry.find_backend(name)) is None]
    engines = [f"unipar_{name}.engine" for name in here]
    return ["torch", "torch._dynamo", "torch.distributed.fsdp", *TRACED, *RUNS, "tests.support.forks", *engines]


@final
class Forks(WorkerStarter):
    """Starts workers as forks; those that begin with other settings than there are servers for, as new interpreters."""

    def __init__(self, servers: Sequence[tuple[Mapping[str, str], ForkServer]] = ()) -> None:
        self._servers = list(servers)
        self._open = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    @property
    def plain(self) -> ForkServer:
        """The server of workers whose memory is not counted."""
        return self._server({})

    def _server(self, settings: Mapping[str, str]) -> ForkServer:
        """Return the server with these settings; it is started when it is first asked for."""
        for known, server in self._servers:
            if known == settings:
                return server
        path = os.pathsep.join(filter(None, [str(ROOT), BEGUN["PYTHONPATH"]]))
        made = self._open.enter_context(ForkServer(modules(), {**BEGUN, **settings, "PYTHONPATH": path}))
        self._servers.append((settings, made))
        return made

    @property
    @override
    def pid(self) -> int:
        return os.getpid()  # `start` says which server's it is

    @override
    def start(self, arguments: WorkerArguments, environment: Mapping[str, str], log: int) -> WorkerProcess:
        settings = {name: environment[name] for name in SETTINGS if environment.get(name)}
        if settings and settings != _metered():
            return SubprocessStarter().start(replace(arguments, parent=os.getpid()), environment, log)
        server = self._server(settings)
        told = {**environment, ENTRY: arguments.entry}
        return server.start(replace(arguments, parent=server.pid, entry="tests.support.forks:enter"), told, log)

    @contextmanager
    def instead(self) -> Generator[None]:
        """Have worker groups in the body start their workers here, and `verify` do without its own fork server."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(group, "SubprocessStarter", lambda: self)
            patch.setattr(world_pool, "ForkServer", self._as_server)
            yield

    def _as_server(
        self, modules: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> AbstractContextManager[WorkerStarter]:
        return nullcontext(self)

    def unipar(
        self, words: Sequence[str], environment: Mapping[str, str] | None = None, *, memory: bool = False
    ) -> subprocess.CompletedProcess[str]:
        """Run `unipar WORDS...` in a process of its own, to its end; `memory`: its workers are counted."""
        servers = [self._server(settings) for settings in ({}, _metered() if memory else {})]
        given = [f"{_socket(server).fileno()}:{server.pid}" for server in servers]
        fds = {_socket(server).fileno() for server in servers}
        told = {**os.environ, **(environment or {})}
        path = os.pathsep.join(filter(None, [told.get("PYTHONPATH"), str(ROOT)]))
        command = [sys.executable, "-m", "tests.support.forks", *given, *words]
        return subprocess.run(
            command,
            cwd=ROOT,
            env={**told, "PYTHONPATH": path},
            pass_fds=fds,
            capture_output=True,
            text=True,
            check=False,
        )


@cache
def _metered() -> Mapping[str, str]:
    """Return what a process whose memory is counted begins with; empty where there is no compiler."""
    try:
        return malloc_build.preload_environment(malloc_build.build_meter())
    except malloc_build.MeterUnavailable:
        return {}


def _socket(server: ForkServer) -> socket.socket:
    return vars(server)["_socket"]


def lent(word: str) -> ForkServer:
    """Return a server that another process has started and will end."""
    fd, pid = map(int, word.split(":"))
    server = ForkServer(())
    vars(server).update(_socket=socket.socket(fileno=fd), _popen=SimpleNamespace(pid=pid, wait=lambda: "it has ended"))
    return server


def enter(place: Place, run: Path, control: socket.socket | None) -> None:
    """Find modules, in the fork, where a new interpreter would, and do what was asked for."""
    ours = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    servers = BEGUN["PYTHONPATH"].split(os.pathsep)
    sys.path[:] = [*filter(None, ours), *(path for path in sys.path if path not in servers)]
    importlib.invalidate_caches()
    module, _, function = os.environ.pop(ENTRY).partition(":")
    getattr(importlib.import_module(module), function)(place, run, control)


def main(words: Sequence[str]) -> None:
    """Be the command line of `unipar`, with workers of these servers."""
    from unipar.cli.app import main as command

    plain, metered, *rest = words
    sys.argv = ["unipar", *rest]
    servers = [({}, lent(plain)), *([(_metered(), lent(metered))] if metered != plain else [])]
    with Forks(servers) as forks, forks.instead():
        command()


if __name__ == "__main__":
    main(sys.argv[1:])
