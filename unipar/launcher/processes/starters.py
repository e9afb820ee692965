"""Starters of workers: forks of one process that has imported the libraries, or new interpreters."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from typing import Final, Self, final

from unipar.backend import Backend
from unipar.config import Config
from unipar.distributed.accelerators import VISIBLE_DEVICES_VARIABLE
from unipar.launcher.processes import early
from unipar.launcher.processes.early import COMMON_MODULES
from unipar.launcher.processes.forkserver import ForkServer, ForkServerFailed
from unipar.launcher.processes.process import SubprocessStarter, WorkerStarter

ENTRY_MODULES: Final = (
    "unipar.launcher.worker_entries",
    "unipar.config.settled",
    "unipar.task.reference",
    "unipar.training.setup",
)
"""Modules that workers of `launch` and `join` import."""


def modules_to_import(backends: Iterable[Backend], entries: Sequence[str]) -> list[str]:
    """Return the modules that a fork server imports for workers of these backends, besides those of their entry."""
    engines = {name for b in backends if find_spec(name := engine_module(b)) is not None}
    return [*COMMON_MODULES, *entries, *sorted(engines)]


def engine_module(backend: Backend) -> str:
    """Return the name of the module that has the backend's engine, and imports its library."""
    return f"{type(backend).__module__}.engine"


def may_fork(config: Config, device: str) -> bool:
    """Return whether workers may be forks: on the CPU, unless the config says no. CUDA does not survive a fork."""
    return config.launch.fork and device == "cpu"


@final
class SharedForkServer:
    """Context manager: one fork server for workers of several backends.

    A library that cannot be imported there, or that starts threads, is left out: its workers are new interpreters.
    """

    def __init__(
        self,
        entries: Sequence[str],
        environment: Mapping[str, str] | None = None,
        *,
        use: bool = True,
        patience: float | None = None,
        starter: WorkerStarter | None = None,
    ) -> None:
        """Prepare a server of workers whose entry is in the modules `entries`.

        `use`: whether workers may be forks at all; `patience`: seconds after which imports count as hung; `starter`:
        what starts workers that are no forks; None: each is a new interpreter on this machine.
        """
        self._starter = starter or SubprocessStarter()
        self._entries, self._environment, self._use, self._patience = entries, environment or {}, use, patience
        self._open = ExitStack()
        self._server: ForkServer | None = None
        self._separate: dict[str, str] = {}
        self._backends: dict[str, Backend] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def start(self, backends: Sequence[Backend], tick: Callable[[], None] | None = None) -> None:
        """Start the server with the libraries of these backends, without those that cannot be there.

        `tick` is called now and then while libraries are imported.
        """
        self._backends = {engine_module(b): b for b in backends}
        self._open.close()
        self._server = None
        while self._use and self._server is None and self._backends:
            try:
                server = self._begin()
                self._wait_for(server, tick)
                self._server = server
            except ForkServerFailed as e:
                self._open.close()
                why = str(e).strip().splitlines()[-1]
                left_out = [e.module] if e.module in self._backends else list(self._backends)
                for module in left_out:
                    self._separate[self._backends.pop(module).name] = why
        early.end_imports()

    def _begin(self) -> ForkServer:
        """Return a server that imports the libraries: the one that `launch` has started already, or a new one."""
        modules = modules_to_import(self._backends.values(), self._entries)
        if self._environment or (begun := early.take_server()) is None:
            # a library that chooses its device when it is imported must not see a GPU: forks compute on the CPU
            environment = {**self._environment, VISIBLE_DEVICES_VARIABLE: ""}
            return self._open.enter_context(ForkServer(modules, environment))
        server, stack = begun
        self._open.push(stack.__exit__)
        server.import_modules(modules)
        return server

    def _wait_for(self, server: ForkServer, tick: Callable[[], None] | None) -> None:
        began = time.monotonic()
        while not server.wait_until_ready(None if tick is None and self._patience is None else 0.1):
            if self._patience is not None and time.monotonic() - began > self._patience:
                raise ForkServerFailed(f"its imports took more than {self._patience:g} s")
            if tick is not None:
                tick()

    def starter_of(self, backend: Backend) -> WorkerStarter:
        """Return the starter of this backend's workers; a server that was killed is started again."""
        if self._server is not None and not self._server.running:
            self.start(list(self._backends.values()))
        if self._server is None or engine_module(backend) not in self._backends:
            return self._starter
        return self._server

    def why_separate(self, backend: Backend) -> str:
        """Return why this backend's workers are new interpreters though others are forks; "" if they are not."""
        why = self._separate.get(backend.name, "")
        return f"its processes started as new interpreters, not as forks: {why}" if why else ""

    @property
    def summary(self) -> str:
        """Sentence on what was imported for all workers; "" if they are new interpreters."""
        if self._server is None:
            return ""
        names = [name for b in self._backends.values() for name in b.requires if name != "torch"]
        return f"libraries are imported, once for all strategies: {', '.join(['torch', *names])}"
