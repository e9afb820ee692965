"""A command in a terminal of its own, typed into as a person would."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

SECONDS = 120.0
"""Seconds after which a command is killed."""

_IN_FOREGROUND = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.executable, sys.argv[1:])"
)
"""Program that makes standard input its controlling terminal, so that Ctrl-C reaches it, and becomes another one."""


def type_into(
    words: Sequence[str],
    typed: Sequence[tuple[str, str]],
    folder: Path,
    more: Mapping[str, str],
) -> tuple[int, str]:
    """Run Python with these words; type each second text once the first one is shown; return exit code and output."""
    ours, theirs = os.openpty()
    command = [sys.executable, "-c", _IN_FOREGROUND, sys.executable, *words]
    process = subprocess.Popen(
        command,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=folder,
        env={**os.environ, **more},
        start_new_session=True,
    )
    os.close(theirs)
    shown, read, left = "", 0, list(typed)
    until = time.monotonic() + SECONDS
    try:
        while time.monotonic() < until:
            if select.select([ours], [], [], 0.1)[0]:
                try:
                    shown += os.read(ours, 65536).decode("utf-8", "replace")
                except OSError:  # nobody has the terminal any more
                    break
            if left and left[0][0] in shown[read:]:
                read = len(shown)
                os.write(ours, left.pop(0)[1].encode())
        return process.wait(max(1.0, until - time.monotonic())), shown.replace("\r\n", "\n")
    finally:
        process.kill()
        process.wait()
        os.close(ours)
