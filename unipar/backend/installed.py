"""Versions of libraries, facts about the machine, and test imports in child processes."""

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
from unipar.backend.registry import find_backend, why_not_installed

IMPORT_TIMEOUT_SECONDS = 120.0
"""Seconds after which a test import counts as failed."""

_PROBE_CODE = (
    "import sys; from unipar.backend.registry import find_backend; print('\\n' + find_backend(sys.argv[1]).version())"
)


@dataclass(frozen=True)
class ImportProbe:
    """Result of importing a backend's library: its version, or why the import failed."""

    version: str | None = None
    absent: str | None = None
    """Names of missing modules and how to install them, if the library is not installed."""

    broken: str | None = None
    """Error of the library, if it is installed but does not import."""


def probe_imports(names: Iterable[str], patience: float = IMPORT_TIMEOUT_SECONDS) -> dict[str, ImportProbe]:
    """Import the libraries of all these backends at once, each in a child process; return the results by name."""
    probes: dict[str, ImportProbe] = {}
    running: dict[str, subprocess.Popen[str]] = {}
    names = list(names)
    try:
        for name in names:
            if why := why_not_installed(find_backend(name)):
                probes[name] = ImportProbe(absent=why)
            else:
                running[name] = _start_probe(name)
        until = time.monotonic() + patience
        for name, child in running.items():
            probes[name] = _finish_probe(name, child, until, patience)
    finally:
        for child in running.values():
            child.kill()
            child.communicate()
    return {name: probes[name] for name in names}


def _start_probe(name: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _PROBE_CODE, name],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )


def _finish_probe(name: str, child: subprocess.Popen[str], until: float, patience: float) -> ImportProbe:
    try:
        out, err = child.communicate(timeout=max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        return ImportProbe(broken=f"importing the library of {name} took longer than {patience:g} s")
    if child.returncode == 0:
        return ImportProbe(version=out.splitlines()[-1])
    if child.returncode < 0:
        return ImportProbe(
            broken=f"importing the library of {name} was killed by {signal.Signals(-child.returncode).name}"
        )
    return ImportProbe(broken=next((line for line in reversed(err.splitlines()) if line.strip()), "it gave no reason"))


_LIBRARIES = ("unipar", "torch", "numpy")


def installed_versions(backends: Iterable[str]) -> dict[str, str]:
    """Return the versions of Python, unipar, PyTorch and the libraries of these backends."""
    return library_versions({module for name in backends for module in registry.find_backend(name).requires})


def library_versions(modules: Iterable[str]) -> dict[str, str]:
    """Return the versions of Python, unipar, PyTorch and these modules."""
    versions = {"python": platform.python_version()}
    for name in (*_LIBRARIES, *sorted(modules)):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def machine_summary() -> dict[str, Any]:
    """Return the operating system, the CPU's model, and the number of cores and bytes of memory."""
    lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    model = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine()
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"system": platform.platform(), "cpu": model, "cores": len(os.sched_getaffinity(0)), "memory": memory}
