"""Building and preloading of the malloc meter, before a worker starts."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Final

from unipar.backend import resources
from unipar.config import Config
from unipar.errors import UniparError
from unipar.utils.files import cache_folder

METER_ENVIRONMENT: Final = {"MKL_DISABLE_FAST_MM": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
"""Variables of measured workers. MKL keeps no buffers, not even while steps are timed. malloc returns freed memory to
the system at once, until `keep_freed_memory`."""


_ALLOCATOR_VARIABLES: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Variables in which torch reads the settings of its CUDA allocator."""


class MeterUnavailable(UniparError):
    """Error: the meter cannot be compiled or preloaded on this machine."""


def build_meter() -> Path:
    """Return the path of the compiled meter in the user's cache, after a check that a process can preload it."""
    source = files("unipar.memory.sources").joinpath("meter.c").read_bytes()
    digest = hashlib.sha256(source + " ".join(platform.libc_ver()).encode()).hexdigest()[:16]
    try:
        library = cache_folder() / f"meter-{platform.machine()}-{digest}.so"
        if not library.exists():
            _compile_meter(source, library)
    except (OSError, RuntimeError) as e:  # the home folder is read-only or missing
        raise MeterUnavailable(
            f"it cannot be stored in the user's cache ({e}): set XDG_CACHE_HOME to another folder"
        ) from None
    _check_preload(library)
    return library


def _compile_meter(source: bytes, library: Path) -> None:
    compiler = next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)
    if compiler is None:
        raise MeterUnavailable(
            "no C compiler (cc, gcc or clang) was found: install one (Debian: apt install gcc libc6-dev)"
        )
    if platform.libc_ver()[0] != "glibc":
        raise MeterUnavailable(
            f"it counts calls of glibc's malloc, and this machine has {platform.libc_ver()[0] or 'another libc'}"
        )
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        text, partial = Path(folder) / "meter.c", Path(folder) / "meter.so"
        text.write_bytes(source)
        done = subprocess.run(
            [compiler, "-O2", "-shared", "-fPIC", "-o", str(partial), str(text)], capture_output=True, text=True
        )
        if done.returncode:
            raise MeterUnavailable(
                f"{compiler} cannot compile it: {(done.stderr.strip().splitlines() or ['no error message'])[-1]}"
            )
        partial.rename(library)


def _check_preload(library: Path) -> None:
    """Raise MeterUnavailable if a process cannot preload the meter: its path has a space, or its disk is noexec."""
    script = "import ctypes; ctypes.CDLL(None).unipar_meter_live"
    environment = {**os.environ, "LD_PRELOAD": str(library)}
    done = subprocess.run([sys.executable, "-I", "-S", "-c", script], env=environment, capture_output=True, text=True)
    if done.returncode:
        why = re.search(r"cannot be preloaded \((.*?)\)", done.stderr)
        reason = f" ({why[1]})" if why else ""
        raise MeterUnavailable(f"it cannot be preloaded from {library}{reason}: set XDG_CACHE_HOME to another folder")


def why_no_history(environ: Mapping[str, str]) -> str:
    """Return the reason why torch's CUDA allocator would keep no history; "" if it keeps one."""
    for name in _ALLOCATOR_VARIABLES:
        if "backend:cudaMallocAsync" in environ.get(name, "").replace(" ", ""):
            return f"{name} says backend:cudaMallocAsync, which keeps no history; leave it out"
    return ""


def step_log_environment(config: Config) -> dict[str, str]:
    """Return variables that make workers count blocks under `log.memory`; empty if the meter is unused or unavailable.

    Workers without the meter log the reason when they start.
    """
    if not config.log.memory or resources.choose_device(config)[0] != "cpu":
        return {}
    try:
        return {"LD_PRELOAD": preload_environment(build_meter())["LD_PRELOAD"]}
    except MeterUnavailable:
        return {}


def preload_environment(meter: Path) -> dict[str, str]:
    """Return variables that preload the meter in a worker, before the libraries that are preloaded already."""
    before = os.environ.get("LD_PRELOAD", "")
    return {"LD_PRELOAD": f"{meter} {before}".strip(), **METER_ENVIRONMENT}
