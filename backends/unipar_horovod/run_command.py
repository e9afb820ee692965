"""Long commands, watched: a line that moves on a terminal, plain lines elsewhere, a log, and nothing left on Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from unipar.utils.terminal import Terminal

MAKE_PERCENT = re.compile(r"^\s*\[\s*(\d+)%\]")
"""As make prints it under CMake."""

ERROR_LINE = re.compile(r"\b(fatal error|error): |^CMake Error|^ERROR: |\bundefined reference to\b")
ShowPercent = Callable[[int], None]
"""Takes the percentage that is done."""


class CommandFailed(Exception):
    """A command ended badly; `str()` is the first line that says why."""


@contextmanager
def show_progress(what: str) -> Generator[ShowPercent]:
    """Context manager: shows that `what` is going on, for how long, and how far it is where that is known."""
    terminal = Terminal(sys.stderr)
    if not terminal.can_draw:
        yield _progress_lines(what, terminal)
        return
    terminal.draw_spinner(what)
    try:
        yield lambda percent: terminal.move_bar(total=100, completed=percent)
    finally:
        terminal.stop()


def _progress_lines(what: str, terminal: Terminal) -> ShowPercent:
    begun, told = time.monotonic(), 0

    def say(percent: int) -> None:
        nonlocal told
        if percent >= told + 20:
            told = percent - percent % 20
            terminal.line(f"{what}: {told} % after {time.monotonic() - begun:.0f} s")

    terminal.line(f"{what} ...")
    return say


def run_logged(
    command: Sequence[str],
    *,
    log: Path,
    env: Mapping[str, str] = os.environ,
    cwd: Path | None = None,
    say: ShowPercent | None = None,
) -> str:
    """Runs it to its end, its words into `log`; gives back the last line. Interrupted, it takes the command along."""
    first = last = ""
    with log.open("a", encoding="utf-8") as out:
        out.write(f"$ {' '.join(command)}\n")
        child = subprocess.Popen(
            command,
            cwd=cwd,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        assert child.stdout is not None
        try:
            for line in child.stdout:
                out.write(line)
                last = line.strip() or last
                if ERROR_LINE.search(line) and not first:
                    first = line.strip()
                elif first.startswith("CMake Error") and first.endswith(":") and line.strip():
                    first += f" {line.strip()}"
                if say and (done := MAKE_PERCENT.match(line)):
                    say(int(done.group(1)))
            code = child.wait()
        finally:
            child.stdout.close()
            if child.poll() is None:
                _end_command(child)
    if code:
        raise CommandFailed(first or last or f"{command[0]} ended with exit code {code}")
    return last


def _end_command(child: subprocess.Popen[str]) -> None:
    """First as Ctrl-C would, so that pip and make put away what they had begun; then whoever is left, for certain."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(5)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
