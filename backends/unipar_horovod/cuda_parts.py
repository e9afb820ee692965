"""Parts of CUDA that a build of Horovod needs, gathered in one folder from nvcc's toolkit and from pip's packages."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

SYSTEM_ROOTS = ("/usr/local/cuda", "/usr/local", "/usr")
HEADERS = ("cuda_runtime.h", "crt/host_config.h", "nv/target", "nccl.h")
LIBRARIES = ("libcudart.so", "libcudart_static.a", "libcudadevrt.a", "libnccl.so")
NEEDED_LIBRARIES = ("libcudart.so", "libnccl.so")

_PACKAGES = {
    "cuda_runtime.h": ("nvidia-cuda-runtime", "nvidia-cuda-runtime"),
    "libcudart.so": ("nvidia-cuda-runtime", "nvidia-cuda-runtime"),
    "crt/host_config.h": ("nvidia-cuda-nvcc", "nvidia-cuda-crt"),
    "nv/target": ("nvidia-cuda-cccl", "nvidia-cuda-cccl"),
    "nvcc": ("", "nvidia-cuda-nvcc"),
    "nccl.h": ("nvidia-nccl", "nvidia-nccl"),
    "libnccl.so": ("nvidia-nccl", "nvidia-nccl"),
}
"""pip's packages that bring a part, up to CUDA 12 (there they end in -cu12) and since CUDA 13."""


@dataclass
class CudaParts:
    """Headers and libraries by the name that compiler and linker look for, with what is missing."""

    nvcc: str = ""
    include: list[Path] = field(default_factory=list[Path])
    """Folders of headers, the first wins."""

    libraries: dict[str, Path] = field(default_factory=dict[str, Path])
    missing: list[str] = field(default_factory=list[str])


def gather_cuda(cuda: str, site: Path, home: Path, path: str, environ: Mapping[str, str]) -> str:
    """Make `home` a CUDA toolkit with NCCL for the build, by links; return what is missing for that, or ""."""
    parts = find_cuda_parts(cuda, site, path, environ)
    if parts.missing:
        return ", ".join(parts.missing)
    for folder in parts.include:
        for header in folder.rglob("*"):
            link = home / "include" / header.relative_to(folder)
            if header.is_file() and not link.exists():
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(header)
    (home / "lib64").mkdir(parents=True, exist_ok=True)
    for name, library in parts.libraries.items():
        (home / "lib64" / name).symlink_to(library)
    (home / "bin").mkdir(exist_ok=True)
    # nvcc finds its own files beside itself: a link to it would look beside the link
    script = f'#!/bin/sh\nexec {shlex.quote(parts.nvcc)} -I{home}/include -L{home}/lib64 "$@"\n'
    (home / "bin/nvcc").write_text(script, encoding="utf-8")
    (home / "bin/nvcc").chmod(0o755)
    return ""


def cuda_variables(home: Path) -> dict[str, str]:
    """Return the variables that lead Horovod's build to the gathered parts."""
    return {
        "HOROVOD_GPU_OPERATIONS": "NCCL",
        "HOROVOD_CUDA_HOME": str(home),
        "CUDA_HOME": str(home),
        "CUDA_PATH": str(home),
        "CUDAToolkit_ROOT": str(home),
        "HOROVOD_NCCL_INCLUDE": str(home / "include"),
        "HOROVOD_NCCL_LIB": str(home / "lib64"),
        "HOROVOD_NCCL_LINK": "SHARED",
    }


def find_cuda_parts(cuda: str, site: Path, path: str, environ: Mapping[str, str]) -> CudaParts:
    """Return where each part is: in nvcc's toolkit, in the packages beside torch, or in the system's folders."""
    parts = CudaParts(nvcc=find_nvcc(site, path, environ))
    if not parts.nvcc:
        parts.missing.append(with_package("nvcc", cuda))
    roots = list(_roots(parts.nvcc, site))
    for header in HEADERS:
        folders = [root / part for root in roots for part in ("include", "include/cccl")]
        if include_folder := next((folder for folder in folders if (folder / header).exists()), None):
            parts.include += [] if include_folder in parts.include else [include_folder]
        else:
            parts.missing.append(with_package(header, cuda))
    for name in LIBRARIES:
        if library := _find_library(name, roots):
            parts.libraries[name] = library
        elif name in NEEDED_LIBRARIES:
            parts.missing.append(with_package(name, cuda))
    return parts


def find_nvcc(site: Path, path: str, environ: Mapping[str, str]) -> str:
    """Return nvcc of HOROVOD_CUDA_HOME or CUDA_HOME, on the path, of a pip package, or of the system; or ""."""
    homes = [environ[name] for name in ("HOROVOD_CUDA_HOME", "CUDA_HOME") if environ.get(name)]
    if (on_path := shutil.which("nvcc", path=path)) and not homes:
        return on_path
    packages = sorted(str(root) for root in site.glob("nvidia/*") if (root / "bin/nvcc").exists())
    compilers = (shutil.which("nvcc", path=f"{home}/bin") for home in [*homes, *packages, *SYSTEM_ROOTS])
    return next((nvcc for nvcc in compilers if nvcc), on_path or "")


def _roots(nvcc: str, site: Path) -> Iterator[Path]:
    if nvcc and (top := _toolkit_of(nvcc)):
        yield top
    yield from sorted((site / "nvidia").glob("*"), key=lambda root: (root.name not in ("cuda_runtime", "cu13"), root))
    yield from map(Path, SYSTEM_ROOTS)


def _toolkit_of(nvcc: str) -> Path | None:
    """Return the toolkit's folder as nvcc itself names it: the nvcc on the path may be a script or a link."""
    asked = subprocess.run(
        [nvcc, "--dryrun", "-E", "-x", "cu", "/dev/null"], capture_output=True, text=True, check=False
    )
    top = re.search(r"^#\$ TOP=(.+)$", asked.stderr + asked.stdout, re.MULTILINE)
    return Path(top.group(1).strip()).resolve() if top else None


def _find_library(name: str, roots: list[Path]) -> Path | None:
    for root in roots:
        for folder in ("lib64", "lib", "targets/x86_64-linux/lib", "lib/x86_64-linux-gnu"):
            if named := sorted((root / folder).glob(name if name.endswith(".a") else f"{name}*")):
                return named[0]
    return None


def with_package(part: str, cuda: str) -> str:
    """Return the part with what brings it; no package of pip's brings nvcc itself before CUDA 13."""
    major = int(cuda.split(".")[0])
    if part == "nvcc" and major < 13:
        return f"nvcc (the toolkit of CUDA {cuda})"
    package = _PACKAGES[part][major >= 13]
    if major < 13 or package == "nvidia-nccl":
        package += f"-cu{major}"
    return f"{part} (pip install {package}{'' if 'nccl' in package else f'=={cuda}.*'})"
