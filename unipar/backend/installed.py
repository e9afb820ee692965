"""Versions, machine, and whether a library really imports (asked in a child process)."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from unipar.backend import registry
from unipar.backend.registry import find, missing

PATIENCE = 120.0


_ASK = "import sys; from unipar.backend.registry import find; print('\\n' + find(sys.argv[1]).version())"


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


_LIBRARIES = ("unipar", "torch", "numpy")


def versions(backends: Iterable[str]) -> dict[str, str]:
    """Python's, ours, PyTorch's, and those of what these backends need."""
    return library_versions({module for name in backends for module in registry.find(name).requires})


def library_versions(modules: Iterable[str]) -> dict[str, str]:
    """Return the versions of Python, unipar, PyTorch and these modules."""
    made = {"python": platform.python_version()}
    for name in (*_LIBRARIES, *sorted(modules)):
        try:
            made[name] = version(name)
        except PackageNotFoundError:
            continue
    return made


def machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    model = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine()
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"system": platform.platform(), "cpu": model, "cores": len(os.sched_getaffinity(0)), "memory": memory}
