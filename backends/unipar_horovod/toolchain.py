"""Tools for building Horovod on this machine: torch, compilers, MPI and NCCL, and those that are missing."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from unipar.utils.files import path_with_scripts
from unipar.utils.procfs import available_memory_bytes

OLDEST_CMAKE = (3, 13)
FIRST_SETUPTOOLS_REFUSED = 81
MODULES_NEEDED = ("wheel", "packaging", "cffi", "cloudpickle", "psutil", "yaml")
"""Modules that Horovod's build and its import need; the package of yaml is called pyyaml."""

_TORCH_QUERY = """
import json, os, torch
shown = torch.__config__.show()
print(json.dumps([str(torch.__version__), shown, bool(torch.compiled_with_cxx11_abi()), torch.version.cuda or "",
                  os.path.dirname(os.path.dirname(torch.__file__))]))
"""


@dataclass(frozen=True, kw_only=True)
class TorchBuild:
    """Properties of the installed torch that matter to code compiled against it."""

    version: str
    standard: int
    """C++ standard, as in -std=c++20."""

    abi: bool
    """C++11 ABI, as torch.compiled_with_cxx11_abi() says."""

    cuda: str = ""
    site: Path = Path()
    """Folder that holds torch and the libraries that were installed with it."""


def query_torch() -> TorchBuild | str:
    """Return the properties of this environment's torch, or a sentence that says why it cannot be imported."""
    query = subprocess.run([sys.executable, "-c", _TORCH_QUERY], capture_output=True, text=True, check=False)
    if query.returncode:
        why = query.stderr.strip().splitlines() or [f"exit code {query.returncode}"]
        return f"torch, which cannot be imported: {why[-1]} (pip install torch)"
    number, shown, abi, cuda, site = json.loads(query.stdout.splitlines()[-1])
    return TorchBuild(version=number, standard=cxx_standard_of(shown), abi=abi, cuda=cuda, site=Path(site))


def cxx_standard_of(shown: str) -> int:
    """Return 20 for `C++ Version: 202002`, as torch.__config__.show() prints it; 17 where it prints none."""
    match = re.search(r"C\+\+ Version: 20(\d\d)\d\d", shown)
    return int(match.group(1)) if match else 17


def list_missing(
    torch: TorchBuild | str, environ: Mapping[str, str] = os.environ, path: str | None = None
) -> list[str]:
    """Return every missing tool with the command that installs it, so that one look is enough."""
    return list(_missing_tools(torch, environ, path_with_scripts() if path is None else path))


def _missing_tools(torch: TorchBuild | str, environ: Mapping[str, str], path: str) -> Iterator[str]:
    if isinstance(torch, str):
        yield torch
    if not shutil.which(compiler := environ.get("CXX", "g++"), path=path):
        yield f"a C++ compiler, {compiler} (apt install g++)"
    if not shutil.which("make", path=path):
        yield "make (apt install make)"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        yield "Python.h (apt install python3-dev)"
    yield from _missing_cmake(path)
    if isinstance(torch, TorchBuild) and torch.cuda and not shutil.which("nvcc", path=path):
        yield f"nvcc, as this torch has CUDA {torch.cuda} (apt install nvidia-cuda-toolkit, or a torch for the CPU)"
    if find_spec("pip") is None:
        yield f"pip ({sys.executable} -m ensurepip)"
    have = _version_of("setuptools")
    if have is None or int(have.split(".")[0]) >= FIRST_SETUPTOOLS_REFUSED:
        first = FIRST_SETUPTOOLS_REFUSED
        yield f"setuptools below {first}, found {have or 'none'} (pip install 'setuptools<{first}')"
    if missing := [{"yaml": "pyyaml"}.get(name, name) for name in MODULES_NEEDED if find_spec(name) is None]:
        yield f"{', '.join(missing)} (pip install {' '.join(missing)})"


def _missing_cmake(path: str) -> Iterator[str]:
    wanted = f"cmake {'.'.join(map(str, OLDEST_CMAKE))} or newer"
    found = shutil.which("cmake", path=path)
    if not found:
        yield f"{wanted} (pip install cmake)"
        return
    shown = subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout
    number = re.search(r"version (\d+)\.(\d+)", shown)
    if number is None or tuple(map(int, number.groups())) < OLDEST_CMAKE:
        yield f"{wanted}, found {found} that says {shown.splitlines()[:1]} (pip install cmake)"


def _version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@dataclass(frozen=True)
class BuildFeatures:
    """Features of a build: Gloo and others, with the variables that switch them on in Horovod's build."""

    names: tuple[str, ...]
    variables: Mapping[str, str]
    found: bool = False
    """True where some features were found on this machine and not asked for: a build without them is tried, too."""


def find_features(
    torch: TorchBuild, links: Path, environ: Mapping[str, str] = os.environ, path: str | None = None
) -> BuildFeatures:
    """Return the features that Horovod's own variables ask for; where those are not set, all that this machine has."""
    path = path_with_scripts() if path is None else path
    variables: dict[str, str] = {}
    found = False
    if environ.get("HOROVOD_WITHOUT_MPI") == "1":
        mpi = False
    elif environ.get("HOROVOD_WITH_MPI") == "1":
        mpi = True
    else:
        mpi = found = shutil.which("mpicxx", path=path) is not None
        variables["HOROVOD_WITH_MPI" if mpi else "HOROVOD_WITHOUT_MPI"] = "1"
    gpu = environ.get("HOROVOD_GPU_OPERATIONS")
    if gpu is None and torch.cuda and (nccl := _nccl_variables(torch, links)) is not None:
        gpu, found = "NCCL", True
        variables |= {"HOROVOD_GPU_OPERATIONS": gpu, **nccl}
    return BuildFeatures(tuple(x for x in ("gloo", "mpi" if mpi else "", (gpu or "").lower()) if x), variables, found)


def features_asked_for(torch: TorchBuild, links: Path, environ: Mapping[str, str] = os.environ) -> BuildFeatures:
    """Return the features that Horovod's variables ask for, without those that were only found."""
    return find_features(replace(torch, cuda=""), links, environ, path="")


def _nccl_variables(torch: TorchBuild, links: Path) -> dict[str, str] | None:
    """Return the variables that lead the build to NCCL; None where there is no NCCL.

    The system's NCCL needs no variables. The one in torch's packages gets a link `libnccl.so`, which the linker needs.
    """
    if any(Path(root, "include/nccl.h").exists() for root in ("/usr", "/usr/local", "/usr/local/cuda")):
        return {}
    package = torch.site / "nvidia/nccl"
    library = package / "lib/libnccl.so.2"
    if not library.exists() or not (package / "include/nccl.h").exists():
        return None
    links.mkdir(parents=True, exist_ok=True)
    (links / "libnccl.so").symlink_to(library)
    return {
        "HOROVOD_NCCL_INCLUDE": str(package / "include"),
        "HOROVOD_NCCL_LIB": str(links),
        "HOROVOD_NCCL_LINK": "shared",
    }


def wheel_key(horovod: str, torch: TorchBuild, built_with: tuple[str, ...]) -> str:
    """Return the name of a wheel's folder in the cache: everything that the wheel depends on."""
    parts = [
        f"horovod-{horovod}",
        f"torch-{torch.version}",
        f"cxx{torch.standard}",
        f"abi{int(torch.abi)}",
        f"{sys.implementation.cache_tag}",
        platform.machine(),
        "-".join(built_with),
    ]
    return "_".join(parts)


def parallel_jobs() -> int:
    """Return the number of compilers to run at once: one for each core, as far as each has 2 GiB."""
    return max(1, min(len(os.sched_getaffinity(0)), available_memory_bytes() // 2**31))
