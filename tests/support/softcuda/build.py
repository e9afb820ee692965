"""Compilation of an emulated device, once for its kind, an installation of torch, and the sources."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

SOURCES = Path(__file__).with_name("native")
DEVICE, BINDINGS = "libsoftcuda.so", "_softcuda.so"
FLAGS = ("-std=c++20", "-fPIC", "-shared", "-w", "-DUSE_DISTRIBUTED")
KINDS = {"cuda": (), "npu": ("-DSOFTCUDA_NPU",)}
"""Flags with which the sources are compiled for each kind of device."""


class NotBuilt(Exception):
    """The emulated device could not be compiled here; the text says why."""


@cache
def library_folder(kind: str = "cuda") -> Path:
    """Return the folder with both libraries, compiled if this is the first time; raise NotBuilt if that cannot be."""
    torch = _torch_folder()
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise NotBuilt("no C++ compiler: the emulated device is compiled with g++")
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        raise NotBuilt("no Python.h: on Debian it is in python3-dev")
    folder = _cache_folder() / _key(kind)
    if (folder / BINDINGS).exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / "lock", "w", encoding="utf-8") as lock:  # several test processes start at once
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / BINDINGS).exists():
            with tempfile.TemporaryDirectory(dir=folder.parent) as made:
                _compile(compiler, torch, Path(made), KINDS[kind])
                folder.mkdir(exist_ok=True)
                for name in (DEVICE, BINDINGS):  # the second last: it says that both are there
                    os.replace(Path(made) / name, folder / name)
    return folder


def why_not_built(kind: str = "cuda") -> str:
    """Return why an emulated device cannot be had here; "" if it can."""
    try:
        library_folder(kind)
    except NotBuilt as e:
        return str(e)
    return ""


def _torch_folder() -> Path:
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        raise NotBuilt("torch is not installed")
    if version("torch").partition("+")[2].startswith("cu"):
        raise NotBuilt(f"torch {version('torch')} has a CUDA of its own")
    return Path(spec.origin).resolve().parent


def _key(kind: str) -> str:
    digest = hashlib.sha256(str(_torch_folder()).encode())  # where the libraries look for torch's
    for file in sorted(SOURCES.rglob("*.*")):
        digest.update(file.name.encode() + file.read_bytes())
    return f"{kind}-torch-{version('torch')}-{sys.implementation.cache_tag}-{digest.hexdigest()[:16]}"


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "unipar" / "softcuda"


def _compile(compiler: str, torch: Path, folder: Path, flags: Sequence[str]) -> None:
    headers = [f"-I{torch}/include", f"-I{torch}/include/torch/csrc/api/include"]
    libraries = [f"-L{torch}/lib", f"-Wl,-rpath,{torch}/lib", "-ltorch_cpu", "-lc10"]
    python = ["-DTORCH_EXTENSION_NAME=_softcuda", f"-I{sysconfig.get_path('include')}"]
    device = [f"-L{folder}", "-lsoftcuda", "-Wl,-rpath,$ORIGIN"]
    for words in (
        ["-O1", "device_library.cpp", "-o", folder / DEVICE, *headers, *libraries],
        ["-O0", "bindings.cpp", "-o", folder / BINDINGS, *headers, *python, *device, *libraries, "-ltorch_python"],
    ):
        done = subprocess.run(
            [compiler, *FLAGS, *flags, *words], cwd=SOURCES, capture_output=True, text=True, check=False
        )
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if "error" in line] or [f"exit {done.returncode}"]
            raise NotBuilt(f"the emulated device does not compile with torch {version('torch')}: {errors[0]}")
