"""Whether a backend's library can really be imported: tried in a process of its own, which it may end or hang."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass

from unipar.registry import find, missing

PATIENCE = 120.0
_ASK = "import sys; from unipar.registry import find; print('\\n' + find(sys.argv[1]).version())"


@dataclass(frozen=True)
class Seen:
    """What importing a backend's library came to: its version, or why there is none."""

    version: str | None = None
    absent: str | None = None
    """It is not installed: what is missing, and how to get it."""

    broken: str | None = None
    """It is installed and does not import: its own error."""


def seen(names: Iterable[str], patience: float = PATIENCE) -> dict[str, Seen]:
    """Each backend by name, imported side by side."""
    found: dict[str, Seen] = {}
    running: dict[str, subprocess.Popen[str]] = {}
    names = list(names)
    try:
        for name in names:
            if why := missing(find(name)):
                found[name] = Seen(absent=why)
            else:
                running[name] = _asking(name)
        until = time.monotonic() + patience
        for name, child in running.items():
            found[name] = _answer(name, child, until, patience)
    finally:
        for child in running.values():
            child.kill()
            child.communicate()
    return {name: found[name] for name in names}


def _asking(name: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _ASK, name],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )


def _answer(name: str, child: subprocess.Popen[str], until: float, patience: float) -> Seen:
    try:
        out, err = child.communicate(timeout=max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        return Seen(broken=f"importing the library of {name} took longer than {patience:g} s")
    if child.returncode == 0:
        return Seen(version=out.splitlines()[-1])
    if child.returncode < 0:
        return Seen(broken=f"importing the library of {name} ended in {signal.Signals(-child.returncode).name}")
    return Seen(broken=next((line for line in reversed(err.splitlines()) if line.strip()), "no word of why"))
