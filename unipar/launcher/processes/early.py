"""Start of the fork server as soon as `launch` is called: torch is imported while the config is read and checked."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack, suppress
from typing import Any, Final

from unipar.distributed.accelerators import count_visible_gpus
from unipar.launcher.processes import script_fork
from unipar.launcher.processes.forkserver import ForkServer, ForkServerFailed

COMMON_MODULES: Final = ("torch", "torch._dynamo", "torch.distributed.fsdp")
"""Modules that every backend's workers import, and that take longest. (An optimizer of torch imports `_dynamo`.)"""

_begun: list[tuple[ForkServer, ExitStack]] = []
"""The server that was started, and what ends it, until it is taken."""


def begin_imports() -> None:
    """Start a process that imports torch, for workers to be forked from; not in a rank, nor where there are GPUs."""
    if _begun or _is_worker() or _has_rank() or count_visible_gpus():
        return
    for of_this_process in (False,) if script_fork.why_not_fork() else (True, False):
        with suppress(ForkServerFailed), ExitStack() as stack:  # this process may have threads: then a new one
            server = stack.enter_context(ForkServer(COMMON_MODULES, of_this_process=of_this_process))
            _begun.append((server, stack.pop_all()))
            return


def take_server() -> tuple[ForkServer, ExitStack] | None:
    """Return the server that was started and what ends it, which the caller then closes; None if there is none."""
    return _begun.pop() if _begun else None


def end_imports() -> None:
    """End the server if nobody has taken it: the config is wrong, or its workers are no forks."""
    if (taken := take_server()) is not None:
        taken[1].close()


def _is_worker() -> bool:
    """Return whether unipar has started this process, which imports or runs a script that calls `launch`."""
    importing: Any = sys.modules.get("unipar.task.importing")
    entries: Any = sys.modules.get("unipar.launcher.worker_entries")
    return (importing is not None and importing.is_importing_task()) or (
        entries is not None and entries.script_context is not None
    )


def _has_rank() -> bool:
    """Return whether a launcher has given this process a rank, by the names that launchers use for that."""
    return any(name.endswith("RANK") or name == "SLURM_STEP_ID" for name in os.environ)
