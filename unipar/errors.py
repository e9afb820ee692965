"""Everything unipar raises on purpose.

* UniparError
  + ConfigError          the config is not one: a key, a value, arithmetic that does not work out   (exit 2)
  + TaskError            the user's task: absent, incomplete, or its arguments do not fit            (exit 2)
  + OutExists            the run folder is there already                                             (exit 2)
  + ReportError          a run folder that cannot be read, or a page that cannot be written          (exit 2)
  + BackendNotFound      no installed package offers that name                                       (exit 3)
  + BackendNotInstalled  it is known, its library is missing or broken                               (exit 3)
  + Unsupported          the backend cannot do what the config asks                                  (exit 3)
  + WorldMismatch        the processes found are not the processes asked for                         (exit 3)
  + WorkerFailed         a process of the run ended badly                                            (exit 1)
    - Hung               one fell silent while the others waited for it
  + OutOfMemory          a rank ran out of memory: where, what held the most, what would have fitted  (exit 1)
  + NonFinite            the loss became NaN or infinite: which step, which rank                     (exit 1)
  + Stopped              a signal ended the run at a step boundary                                   (exit 130)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from typing_extensions import override


class UniparError(Exception):
    """Catch this to catch them all."""

    code: ClassVar[int] = 1
    """What the command line exits with."""


class ConfigError(UniparError, ValueError):
    code = 2


class TaskError(UniparError, ValueError):
    code = 2


class OutExists(UniparError, FileExistsError):
    code = 2


class ReportError(UniparError):
    code = 2


class BackendNotFound(UniparError, LookupError):
    code = 3


class BackendNotInstalled(UniparError, ImportError):
    code = 3


class Unsupported(UniparError):
    """A cell that does not exist, or a config that it cannot run: every reason, a sentence each."""

    code = 3

    def __init__(self, cell: str, reasons: Sequence[str]) -> None:
        super().__init__(cell, tuple(reasons))
        self.cell, self.reasons = cell, tuple(reasons)

    @override
    def __str__(self) -> str:
        if len(self.reasons) == 1:
            return f"{self.cell}: {self.reasons[0]}"
        return "\n  - ".join([f"{self.cell} cannot run this config:", *self.reasons])


class WorldMismatch(UniparError):
    code = 3


class WorkerFailed(UniparError):
    """One rank ended badly; `traceback` is its own, `log` is where the rest of its words are."""

    def __init__(self, message: str, *, rank: int | None = None, traceback: str = "", log: str = "") -> None:
        super().__init__(message)
        self.rank, self.traceback, self.log = rank, traceback, log


class Hung(WorkerFailed): ...


class OutOfMemory(UniparError, MemoryError): ...


class NonFinite(UniparError): ...


class Stopped(UniparError):
    code = 130


def rebuild(kind: str, message: str) -> UniparError | None:
    """The error that a worker raised on purpose, as the same type, here; None for any other."""
    plain = (
        ConfigError,
        TaskError,
        OutExists,
        ReportError,
        BackendNotFound,
        BackendNotInstalled,
        WorldMismatch,
        Hung,
        OutOfMemory,
        NonFinite,
        Stopped,
    )
    made = {c.__name__: c for c in plain}
    if kind in made:
        return made[kind](message)
    if kind == Unsupported.__name__:
        cell, _, rest = message.partition(":")
        return Unsupported(cell, [rest.strip()])
    return None
