"""All exceptions that unipar raises on purpose.

* UniparError
  + ConfigError          the config is invalid: a key, a value, or numbers that do not fit together  (exit 2)
  + TaskError            the user's task is missing, incomplete, or its arguments do not fit         (exit 2)
  + OutExists            the run folder already exists                                               (exit 2)
  + ReportError          a run folder cannot be read, or a page cannot be written                    (exit 2)
  + CheckpointError      a checkpoint cannot be written, or is broken, or does not fit this run      (exit 1)
  + BackendNotFound      no installed package offers a backend of that name                          (exit 3)
  + BackendNotInstalled  the backend is known, but its library is missing or broken                  (exit 3)
  + Unsupported          the backend cannot do what the config asks                                  (exit 3)
  + WorldMismatch        the processes found are not the processes asked for                         (exit 3)
  + WorkerFailed         a process of the run failed                                                 (exit 1)
    - Hung               a process made no progress while the others waited for it
  + OutOfMemory          a rank ran out of memory: where, what used most of it, what would have fit  (exit 1)
  + NonFinite            the loss became NaN or infinite: which step, which rank                     (exit 1)
  + Inconsistent         train.consistency_check found that ranks or the optimizer do not do what they should   (exit 1)
  + Stopped              a signal ended the run at a step boundary                                   (exit 130)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from typing_extensions import override


class UniparError(Exception):
    """Base class of all errors that unipar raises on purpose.

    Examples:
        >>> try:
        ...     unipar.launch({"batch": {"total": 16}, "train": {"step": 8}})
        ... except unipar.UniparError as error:
        ...     type(error).__name__, error.code
        ('ConfigError', 2)
    """

    code: ClassVar[int] = 1
    """Exit code of the command line."""


class ConfigError(UniparError, ValueError):
    """Error for an invalid config: a key, a value, or numbers that do not fit together."""

    code = 2


class TaskError(UniparError, ValueError):
    """Error for a task that is missing or incomplete, or whose arguments do not fit."""

    code = 2


class OutExists(UniparError, FileExistsError):
    """Error for an output folder that is already in use."""

    code = 2


class ReportError(UniparError):
    """Error for a run folder that cannot be read, or a page that cannot be written."""

    code = 2


class CheckpointError(UniparError):
    """Error for a checkpoint that cannot be written, or is broken, or does not fit the run."""


class BackendNotFound(UniparError, LookupError):
    """Error for a backend name that no installed package offers."""

    code = 3


class BackendNotInstalled(UniparError, ImportError):
    """Error for a backend whose library is missing or broken."""

    code = 3


class Unsupported(UniparError):
    """Error for a strategy that does not exist or cannot run the config.

    Args:
        strategy: The strategy, such as `horovod/parameters`.
        reasons: A sentence for each reason.

    Examples:
        >>> error = unipar.Unsupported("horovod/parameters", ["it splits no parameters"])
        >>> str(error)
        'horovod/parameters: it splits no parameters'
    """

    code = 3

    def __init__(self, strategy: str, reasons: Sequence[str]) -> None:
        super().__init__(strategy, tuple(reasons))
        self.strategy, self.reasons = strategy, tuple(reasons)

    @override
    def __str__(self) -> str:
        if len(self.reasons) == 1:
            return f"{self.strategy}: {self.reasons[0]}"
        return "\n  - ".join([f"{self.strategy} cannot run this config:", *self.reasons])


class WorldMismatch(UniparError):
    """Error for processes that are not those that the config or the launcher asked for."""

    code = 3


class WorkerFailed(UniparError):
    """Error for a rank that failed.

    Args:
        message: One sentence with the cause and the innermost line of the user's code.
        rank: The rank; None if it is not known.
        traceback: The traceback of that rank.
        log: Path of its log.

    Examples:
        >>> error = unipar.WorkerFailed("rank 1 failed: ...", rank=1, log="runs/train/rank-1.log")
        >>> error.rank, error.code
        (1, 1)
    """

    def __init__(self, message: str, *, rank: int | None = None, traceback: str = "", log: str = "") -> None:
        super().__init__(message)
        self.rank, self.traceback, self.log = rank, traceback, log


class Hung(WorkerFailed):
    """Error for a rank that made no progress while the others waited for it."""


class OutOfMemory(UniparError, MemoryError):
    """Error for a rank that ran out of memory."""


class NonFinite(UniparError):
    """Error for a loss that became NaN or infinite."""


class Inconsistent(UniparError):
    """Error for a run whose ranks or optimizer do not do what they should, as `train.consistency_check` found."""


class Stopped(UniparError):
    """Error for a run that a signal ended at a step boundary."""

    code = 130


def rebuild(kind: str, message: str) -> UniparError | None:
    """Return a worker's error with its original type, given the type's name, or None if it is not a UniparError."""
    plain = (
        ConfigError,
        TaskError,
        OutExists,
        ReportError,
        CheckpointError,
        BackendNotFound,
        BackendNotInstalled,
        WorldMismatch,
        Hung,
        OutOfMemory,
        NonFinite,
        Inconsistent,
        Stopped,
    )
    by_name = {c.__name__: c for c in plain}
    if kind in by_name:
        return by_name[kind](message)
    if kind == Unsupported.__name__:
        strategy, _, rest = message.partition(":")
        return Unsupported(strategy, [rest.strip()])
    return None
