"""Public names of unipar: one PyTorch training loop under many backends. Each name is imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unipar.comparison.compare import compare
    from unipar.comparison.make_plan import plan
    from unipar.comparison.scale import scale
    from unipar.config import Config, Strategy
    from unipar.errors import (
        BackendNotFound,
        BackendNotInstalled,
        CheckpointError,
        ConfigError,
        Hung,
        Inconsistent,
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
    from unipar.launcher.launch import join, launch
    from unipar.optimizers.matrix_optimizer import MatrixOptimizer
    from unipar.results.run_report import Report
    from unipar.task import Run, Task
    from unipar.task.gathered import gathered
    from unipar.tracking.tracker import Tracker
    from unipar.verification.verify import verify

    __version__: str

__all__ = [
    "BackendNotFound",
    "BackendNotInstalled",
    "CheckpointError",
    "Config",
    "ConfigError",
    "Hung",
    "Inconsistent",
    "MatrixOptimizer",
    "NonFinite",
    "OutExists",
    "OutOfMemory",
    "Report",
    "ReportError",
    "Run",
    "Stopped",
    "Strategy",
    "Task",
    "TaskError",
    "Tracker",
    "UniparError",
    "Unsupported",
    "WorkerFailed",
    "WorldMismatch",
    "__version__",
    "compare",
    "gathered",
    "join",
    "launch",
    "plan",
    "scale",
    "verify",
]

_HOMES = {
    "Strategy": "config",
    "Config": "config",
    "MatrixOptimizer": "optimizers.matrix_optimizer",
    "Report": "results.run_report",
    "Run": "task",
    "Task": "task",
    "Tracker": "tracking.tracker",
    "compare": "comparison.compare",
    "gathered": "task.gathered",
    "join": "launcher.launch",
    "launch": "launcher.launch",
    "plan": "comparison.make_plan",
    "scale": "comparison.scale",
    "verify": "verification.verify",
}
"""Module of each public name that is not an error."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'unipar' has no attribute {name!r}")
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("unipar")
    else:
        from importlib import import_module

        value = getattr(import_module(f"unipar.{_HOMES.get(name, 'errors')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
