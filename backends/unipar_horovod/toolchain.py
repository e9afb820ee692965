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
from unipar_horovod.cuda_parts import cuda_variables, find_nvcc, gather_cuda, with_package

HOROVOD_VERSION = "0.28.1"
OLDEST_CMAKE = (3, 13)
FIRST_SETUPTOOLS_REFUSED = 81
MODULES_NEEDED = ("wheel", "packaging", "cffi", "cloudpickle", "psutil", "yaml")
"""Modules that Horovod's build and its import need; the package of yaml is called pyyaml."""

_TORCH_QUERY = """
import json, os, torch
shown = torch.__config__.show()
print(json.dumps([str(torch.__version__), shown, bool(torch.compiled_with_cxx11_abi()), torch.version.cuda or "",
                  os.path.dirname(os.path.dirname(torch.__file__)), torch.version.hip or ""]))
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

    hip: str = ""


def query_torch() -> TorchBuild | str:
    """Return the properties of this environment's torch, or a sentence that says why it cannot be imported."""
    query = subprocess.run([sys.executable, "-c", _TORCH_QUERY], capture_output=True, text=True, check=False)
    if query.returncode:
        why = query.stderr.strip().splitlines() or [f"exit code {query.returncode}"]
        return f"torch, which cannot be imported: {why[-1]} (pip install torch)"
    number, shown, abi, cuda, site, hip = json.loads(query.stdout.splitlines()[-1])
    return TorchBuild(version=number, standard=cxx_standard_of(shown), abi=abi, cuda=cuda, site=Path(site), hip=hip)


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
    asked = environ.get("HOROVOD_GPU_OPERATIONS")
    if isinstance(torch, TorchBuild) and torch.cuda and asked and not find_nvcc(torch.site, path, environ):
        yield f"for HOROVOD_GPU_OPERATIONS={asked}, {with_package('nvcc', torch.cuda)}"
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
    cmake = shutil.which("cmake", path=path)
    if not cmake:
        yield f"{wanted} (pip install cmake)"
        return
    shown = subprocess.run([cmake, "--version"], capture_output=True, text=True, check=False).stdout
    number = re.search(r"version (\d+)\.(\d+)", shown)
    if number is None or tuple(map(int, number.groups())) < OLDEST_CMAKE:
        yield f"{wanted}, found {cmake} that says {shown.splitlines()[:1]} (pip install cmake)"


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

    cuda: Path | None = None
    """CUDA toolkit of the build; None builds for CPU tensors."""

    notes: tuple[str, ...] = ()
    """Sentences about what was left out, and how to get it."""


def find_features(
    torch: TorchBuild, links: Path, environ: Mapping[str, str] = os.environ, path: str | None = None
) -> BuildFeatures:
    """Return the features that Horovod's own variables ask for; where those are not set, all that this machine has."""
    path = path_with_scripts() if path is None else path
    mpi = _find_mpi(environ, path)
    cuda = _find_cuda(torch, links / "cuda", environ, path)
    return BuildFeatures(
        names=("gloo", *mpi.names, *cuda.names),
        variables={**mpi.variables, **cuda.variables},
        found=mpi.found or cuda.found,
        cuda=cuda.cuda,
        notes=mpi.notes + cuda.notes,
    )


def features_asked_for(torch: TorchBuild, links: Path, environ: Mapping[str, str] = os.environ) -> BuildFeatures:
    """Return the features that Horovod's variables ask for, without those that were only found."""
    asked = torch if environ.get("HOROVOD_GPU_OPERATIONS") else replace(torch, cuda="")
    return replace(find_features(asked, links, environ, ""), found=False)


def _find_mpi(environ: Mapping[str, str], path: str) -> BuildFeatures:
    """Return MPI where it is asked for, or where its compiler finds its headers: some systems have the one alone."""
    if environ.get("HOROVOD_WITHOUT_MPI") == "1":
        return BuildFeatures((), {})
    if environ.get("HOROVOD_WITH_MPI") == "1":
        return BuildFeatures(("mpi",), {})
    without = {"HOROVOD_WITHOUT_MPI": "1"}
    if (compiler := shutil.which("mpicxx", path=path)) is None:
        return BuildFeatures((), without)
    command = [compiler, "-E", "-x", "c++", "-"]
    tried = subprocess.run(command, input="#include <mpi.h>\n", capture_output=True, text=True, check=False)
    if tried.returncode:
        return BuildFeatures((), without, notes=(f"without MPI, as {compiler} finds no mpi.h",))
    return BuildFeatures(("mpi",), {"HOROVOD_WITH_MPI": "1"}, found=True)


def _find_cuda(torch: TorchBuild, home: Path, environ: Mapping[str, str], path: str) -> BuildFeatures:
    """Return NCCL with the CUDA parts gathered in `home`, where torch has CUDA and no part is missing."""
    asked = environ.get("HOROVOD_GPU_OPERATIONS", "")
    if not torch.cuda or "HOROVOD_GPU" in environ:
        return BuildFeatures((asked.lower(),) if asked else (), {})
    missing = "" if home.exists() else gather_cuda(torch.cuda, torch.site, home, path, environ)
    variables = {} if missing else cuda_variables(home)
    if asked:  # what the user's own variables say comes first
        variables = {name: value for name, value in variables.items() if name not in environ}
        return BuildFeatures((asked.lower(),), variables, cuda=None if missing else home)
    if missing:
        return BuildFeatures((), {}, notes=(f"for CPU tensors only: for CUDA {torch.cuda} it lacks {missing}",))
    return BuildFeatures(("nccl",), variables, found=True, cuda=home)


def wheel_key(horovod: str, torch: TorchBuild, built_with: tuple[str, ...], recipe: str) -> str:
    """Return the name of a wheel's folder in the cache: everything that the wheel depends on."""
    parts = [
        f"horovod-{horovod}",
        f"torch-{torch.version}",
        f"cxx{torch.standard}",
        f"abi{int(torch.abi)}",
        f"{sys.implementation.cache_tag}",
        platform.machine(),
        "-".join(built_with),
        recipe,
    ]
    return "_".join(parts)


def parallel_jobs() -> int:
    """Return the number of compilers to run at once: one for each core, as far as each has 2 GiB."""
    return max(1, min(len(os.sched_getaffinity(0)), available_memory_bytes() // 2**31))
