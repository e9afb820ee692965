"""Debuggers in ranks: `breakpoint()` takes the terminal, and the parent stops drawing and timing until the run ends."""

from __future__ import annotations

import bdb
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from unipar.run_folder.layout import debugger_path

SECONDS_FOR_PARENT = 5.0
"""Seconds that a debugger waits for the parent to stop drawing."""


def call_before_debugger(prepare: Callable[[], object]) -> Callable[[], None]:
    """Have `prepare` called before a debugger (pdb, or another one on bdb) first starts here; return what undoes it."""
    original: Callable[..., None] = bdb.Bdb.__init__

    def undo() -> None:
        bdb.Bdb.__init__ = original

    def begin(self: bdb.Bdb, *args: Any, **named: Any) -> None:
        undo()
        prepare()  # pdb takes sys.stdout after this call
        original(self, *args, **named)

    bdb.Bdb.__init__ = begin
    return undo


def give_terminal_to_debugger(run: Path, terminal: int) -> None:
    """Have a debugger in this rank read and write the terminal behind this descriptor."""
    os.set_inheritable(terminal, False)
    call_before_debugger(lambda: _take_terminal(run, terminal))


def stop_drawing(run: Path) -> None:
    """Wait until the run's progress bar is gone, for `SECONDS_FOR_PARENT` at most; nothing is drawn again."""
    sys.stdout.flush()
    asked = debugger_path(run)
    asked.touch()
    until = time.monotonic() + SECONDS_FOR_PARENT
    while asked.exists() and time.monotonic() < until:
        time.sleep(0.01)


def _take_terminal(run: Path, terminal: int) -> None:
    stop_drawing(run)
    for fd in (0, 1):  # readline works on these numbers only
        os.dup2(terminal, fd)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - open until this process ends
    sys.stdout = open(1, "w", encoding="utf-8", errors="replace", buffering=1, closefd=False)  # noqa: SIM115
