"""Long commands with progress (drawn on a terminal, plain lines elsewhere) and a log; Ctrl-C ends their processes."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from unipar.utils.terminal import Terminal

MAKE_PERCENT = re.compile(r"^\s*\[\s*(\d+)%\]")
"""Progress in percent, as make prints it under CMake."""

ERROR_LINE = re.compile(r"\b(fatal error|error): |^CMake Error|^ERROR: |\bundefined reference to\b")
"""Line of a compiler's, CMake's, pip's or linker's error."""

ShowPercent = Callable[[int], None]
"""Function that shows the progress in percent."""


class CommandFailed(Exception):
    """Failure of a command; `str()` is the first line of its output that says why."""


@contextmanager
def show_progress(task: str) -> Generator[ShowPercent]:
    """Context manager: show that `task` is running, for how long, and the percentage once it is known."""
    terminal = Terminal(sys.stderr)
    if not terminal.can_draw:
        yield _progress_lines(task, terminal)
        return
    terminal.draw_spinner(task)
    try:
        yield lambda percent: terminal.move_bar(total=100, completed=percent)
    finally:
        terminal.stop()


def count_finished(show: ShowPercent, jobs: int) -> ShowPercent:
    """Return a function for make's percentages, which count what is begun: it shows what `jobs` compilers finished."""
    begun: deque[int] = deque(maxlen=jobs)

    def say(percent: int) -> None:
        if percent >= 100:
            show(percent)
        elif len(begun) == jobs:
            show(begun[0])
        begun.append(percent)

    return say


def _progress_lines(task: str, terminal: Terminal) -> ShowPercent:
    begun, last = time.monotonic(), 0

    def show(percent: int) -> None:
        nonlocal last
        if percent >= last + 20:
            last = percent - percent % 20
            terminal.line(f"{task}: {last} % after {time.monotonic() - begun:.0f} s")

    terminal.line(f"{task} ...")
    return show


def run_logged(
    command: Sequence[str],
    *,
    log: Path,
    env: Mapping[str, str] = os.environ,
    say: ShowPercent | None = None,
) -> str:
    """Run a command, append its output to `log`, and return the last line; end the command when interrupted."""
    first = last = ""
    with log.open("a", encoding="utf-8") as out:
        out.write(f"$ {' '.join(command)}\n")
        with _signals_held() as deliver:
            child = subprocess.Popen(
                command,
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
            deliver()
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


@contextmanager
def _signals_held() -> Generator[Callable[[], None]]:
    """Context manager: note SIGINT and SIGTERM instead of acting on them; yield the function that sends them again.

    Where a handler raises inside Popen, nobody knows the process that it has started, and so nobody ends it.
    """
    came: list[int] = []

    def deliver() -> None:
        for number in came:
            signal.raise_signal(number)

    if threading.current_thread() is not threading.main_thread():  # no handler runs here
        yield deliver
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number, handler in before.items():
        if callable(handler):
            signal.signal(number, lambda got, _: came.append(got))
    try:
        yield deliver
    finally:
        for number, handler in before.items():
            if callable(handler):
                signal.signal(number, handler)


def _end_command(child: subprocess.Popen[str]) -> None:
    """Send SIGINT, so that pip and make can clean up; after 5 seconds send SIGKILL to what is left of the group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(5)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
