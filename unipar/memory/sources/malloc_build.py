"""The malloc meter, before a worker starts: compiled once, and preloaded."""

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
"""What only the environment can set: MKL keeps no buffers of its own, while it is timed, too; and malloc gives back at
once what is freed, until it is told to keep it."""


_ALLOCATOR_VARIABLES: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Where torch reads which allocator CUDA's memory has."""


class MeterUnavailable(UniparError):
    """The meter cannot be compiled here, or not be preloaded."""


def build_meter() -> Path:
    """The compiled meter, in the user's cache; a process was seen to preload it."""
    source = files("unipar.memory.sources").joinpath("meter.c").read_bytes()
    told = hashlib.sha256(source + " ".join(platform.libc_ver()).encode()).hexdigest()[:16]
    try:
        made = cache_folder() / f"meter-{platform.machine()}-{told}.so"
        if not made.exists():
            _compile_meter(source, made)
    except (OSError, RuntimeError) as e:  # a home that is read-only, or none
        raise MeterUnavailable(
            f"it cannot be kept in the user's cache ({e}); XDG_CACHE_HOME takes another place"
        ) from None
    _check_preload(made)
    return made


def _compile_meter(source: bytes, made: Path) -> None:
    compiler = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)
    if compiler is None:
        raise MeterUnavailable(
            "no C compiler (cc, gcc or clang) was found: install one (Debian: apt install gcc libc6-dev)"
        )
    if platform.libc_ver()[0] != "glibc":
        raise MeterUnavailable(
            f"it counts the calls of glibc's malloc, and this is {platform.libc_ver()[0] or 'another libc'}"
        )
    made.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=made.parent) as folder:
        text, partial = Path(folder) / "meter.c", Path(folder) / "meter.so"
        text.write_bytes(source)
        done = subprocess.run(
            [compiler, "-O2", "-shared", "-fPIC", "-o", str(partial), str(text)], capture_output=True, text=True
        )
        if done.returncode:
            raise MeterUnavailable(
                f"{compiler} does not compile it: {(done.stderr.strip().splitlines() or ['it said nothing'])[-1]}"
            )
        partial.rename(made)


def _check_preload(made: Path) -> None:
    """A path with a space in it is none to LD_PRELOAD, and a folder may forbid to run what lies there."""
    look = "import ctypes; ctypes.CDLL(None).unipar_meter_live"
    told = {**os.environ, "LD_PRELOAD": str(made)}
    done = subprocess.run([sys.executable, "-I", "-S", "-c", look], env=told, capture_output=True, text=True)
    if done.returncode:
        why = re.search(r"cannot be preloaded \((.*?)\)", done.stderr)
        said = f" ({why[1]})" if why else ""
        raise MeterUnavailable(f"it cannot be preloaded from {made}{said}; XDG_CACHE_HOME takes another place")


def why_no_history(environ: Mapping[str, str]) -> str:
    """Why torch's allocator of CUDA's memory would keep no history; empty where it does."""
    for name in _ALLOCATOR_VARIABLES:
        if "backend:cudaMallocAsync" in environ.get(name, "").replace(" ", ""):
            return f"{name} says backend:cudaMallocAsync, which keeps no history; leave it out"
    return ""


def step_log_environment(config: Config) -> dict[str, str]:
    """What makes workers count under `log.memory`; nothing where they do without: they say why."""
    if not config.log.memory or resources.choose_device(config)[0] != "cpu":
        return {}
    try:
        return {"LD_PRELOAD": preload_environment(build_meter())["LD_PRELOAD"]}
    except MeterUnavailable:
        return {}


def preload_environment(meter: Path) -> dict[str, str]:
    """What a worker's environment needs, in addition to what is preloaded already."""
    before = os.environ.get("LD_PRELOAD", "")
    return {"LD_PRELOAD": f"{meter} {before}".strip(), **METER_ENVIRONMENT}
