"""What a run ran with: versions of libraries, and the machine. Figures from elsewhere say nothing of this one."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from unipar import registry

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
