"""One PyTorch training loop under many backends. The public names, each imported when it is first used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unipar.config import Cell, Config
    from unipar.errors import (
        BackendNotFound,
        BackendNotInstalled,
        ConfigError,
        Hung,
        NonFinite,
        OutExists,
        OutOfMemory,
        ReportError,
        Stopped,
        TaskError,
        UniparError,
        Unsupported,
        WorkerFailed,
        WorldMismatch,
    )
    from unipar.launcher import join, launch
    from unipar.report import Report
    from unipar.share import Run
    from unipar.task import Task
    from unipar.track import Tracker
    from unipar.verbs.compare import compare
    from unipar.verbs.scale import scale
    from unipar.verbs.verify import verify

    __version__: str

__all__ = [
    "BackendNotFound",
    "BackendNotInstalled",
    "Cell",
    "Config",
    "ConfigError",
    "Hung",
    "NonFinite",
    "OutExists",
    "OutOfMemory",
    "Report",
    "ReportError",
    "Run",
    "Stopped",
    "Task",
    "TaskError",
    "Tracker",
    "UniparError",
    "Unsupported",
    "WorkerFailed",
    "WorldMismatch",
    "__version__",
    "compare",
    "join",
    "launch",
    "scale",
    "verify",
]

_HOMES = {
    "Cell": "config",
    "Config": "config",
    "Report": "report",
    "Run": "share",
    "Task": "task",
    "Tracker": "track",
    "compare": "verbs.compare",
    "join": "launcher",
    "launch": "launcher",
    "scale": "verbs.scale",
    "verify": "verbs.verify",
}
"""The module of each name that is not an error."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'unipar' has no attribute {name!r}")
    if name == "__version__":
        from importlib.metadata import version

        found: Any = version("unipar")
    else:
        from importlib import import_module

        found = getattr(import_module(f"unipar.{_HOMES.get(name, 'errors')}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
