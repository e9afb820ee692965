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

PERCENT = re.compile(r"^\s*\[\s*(\d+)%\]")
"""As make prints it under CMake."""

TROUBLE = re.compile(r"\b(fatal error|error): |^CMake Error|^ERROR: |\bundefined reference to\b")
Say = Callable[[int], None]
"""Takes the percentage that is done."""


class CommandFailed(Exception):
    """A command ended badly; `str()` is the first line that says why."""


@contextmanager
def step(what: str) -> Generator[Say]:
    """Shows that `what` is going on, for how long, and how far it is where that is known."""
    from rich.console import Console

    console = Console(stderr=True)
    with _live(what, console) if console.is_terminal else _plain(what) as say:
        yield say


@contextmanager
def _live(what: str, console: object) -> Generator[Say]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

    assert isinstance(console, Console)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(what, total=None)
        yield lambda percent: progress.update(task, total=100, completed=percent)


@contextmanager
def _plain(what: str) -> Generator[Say]:
    begun, told = time.monotonic(), 0

    def say(percent: int) -> None:
        nonlocal told
        if percent >= told + 20:
            told = percent - percent % 20
            sys.stderr.write(f"{what}: {told} % after {time.monotonic() - begun:.0f} s\n")
            sys.stderr.flush()

    sys.stderr.write(f"{what} ...\n")
    sys.stderr.flush()
    yield say


def run(
    command: Sequence[str],
    *,
    log: Path,
    env: Mapping[str, str] = os.environ,
    cwd: Path | None = None,
    say: Say | None = None,
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
                if TROUBLE.search(line) and not first:
                    first = line.strip()
                elif first.startswith("CMake Error") and first.endswith(":") and line.strip():
                    first += f" {line.strip()}"
                if say and (done := PERCENT.match(line)):
                    say(int(done.group(1)))
            code = child.wait()
        finally:
            child.stdout.close()
            if child.poll() is None:
                _end(child)
    if code:
        raise CommandFailed(first or last or f"{command[0]} ended with exit code {code}")
    return last


def _end(child: subprocess.Popen[str]) -> None:
    """First as Ctrl-C would, so that pip and make put away what they had begun; then whoever is left, for certain."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(5)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
