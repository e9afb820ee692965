"""Changes to Horovod's released source: it compiles for today's torch, in less than half the time, and over machines
its process sets use the network interface that they are told."""

from __future__ import annotations

import hashlib
from importlib.resources import files
from pathlib import Path

from unipar.errors import BackendNotInstalled
from unipar_horovod.toolchain import HOROVOD_VERSION, BuildFeatures, TorchBuild

PATCHED_FILES = ("CMakeLists.txt", "horovod/torch/CMakeLists.txt")
CXX_STANDARD_LINE = "set(CMAKE_CXX_STANDARD 14)"
PROJECT_LINE = "project(horovod CXX)\n"
CUDA_KERNELS = "horovod/common/ops/cuda/CMakeLists.txt"
CUDA_STANDARD_LINE = "set(CMAKE_CUDA_STANDARD 11)"
OTHER_ABI_LINE = "add_library(compatible_horovod_cuda_kernels cuda_kernels.cu)"
LIBRARY_LINE = "add_library(${PYTORCH_TARGET_LIB} SHARED ${SOURCES} ${PYTORCH_SOURCES})\n"
WITHOUT_CUDA = "set(CMAKE_CUDA_COMPILER NOTFOUND)\nset(CMAKE_DISABLE_FIND_PACKAGE_CUDAToolkit TRUE)\n"
"""Lines after which CMake does not try an nvcc that this build does not use."""

GLOO_CONTEXT = "horovod/common/gloo/gloo_context.cc"
PROCESS_SET_LINES = """\
  attr device_attr;
  device_attr.iface = gloo_iface_;
  device_attr.ai_family = AF_UNSPEC;
  auto dev = CreateDevice(device_attr);

  global_ctx = global_context.ctx;
"""
"""Lines for process sets, whose context has no interface of its own yet: gloo would take that of the host's name."""

MARK_FILE = "horovod/unipar_changes.py"
MARK_TEXT = '"""Mark of a Horovod that unipar has built: its process sets use HOROVOD_GLOO_IFACE."""\n'

TORCH_HEADER = """\
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/utils/pybind.h>
namespace torch {
using namespace at;
}
"""
"""Text of the build's own torch/torch.h and torch/extension.h: what Horovod's binding uses of them."""

FIND_TORCH = """\
include(FindPackageHandleStandardArgs)
set(Pytorch_VERSION "{version}")
find_package_handle_standard_args(Pytorch REQUIRED_VARS Pytorch_VERSION VERSION_VAR Pytorch_VERSION)
set(Pytorch_CUDA {cuda})
set(Pytorch_ROCM FALSE)
set(Pytorch_INCLUDE_DIRS "{include}")
set(Pytorch_LIBRARY_DIRS "{libraries_in}")
set(Pytorch_LIBRARIES "{libraries}")
set(Pytorch_CXX11 {abi})
set(Pytorch_COMPILE_FLAGS "-D_GLIBCXX_USE_CXX11_ABI={abi_number}")
"""
"""Text of FindPytorch.cmake; the released one imports torch nine times to find the same."""


def prepare_source(source: Path, torch: TorchBuild, plan: BuildFeatures) -> None:
    """Change the unpacked source: torch's C++ standard, few large units, and what is known about torch already."""
    patch_cxx_standard(source, torch.standard)
    with_interface = "  gloo_iface_ = global_context.gloo_iface_;\n" + PROCESS_SET_LINES
    replace_once(source / GLOO_CONTEXT, PROCESS_SET_LINES, with_interface)
    (source / MARK_FILE).write_text(MARK_TEXT, encoding="utf-8")
    (source / "cmake/units.cmake").write_text(_units_text(), encoding="utf-8")
    standard = f"-std=c++{torch.standard if plan.cuda else 14}"  # CUDA's headers need a later standard than Horovod's
    lines = f'set(UNIT_STANDARD "{standard}")\ninclude("${{PROJECT_SOURCE_DIR}}/cmake/units.cmake")\n'
    replace_once(source / PATCHED_FILES[1], LIBRARY_LINE, lines + LIBRARY_LINE)
    replace_once(source / CUDA_KERNELS, CUDA_STANDARD_LINE, f"set(CMAKE_CUDA_STANDARD {max(17, torch.standard)})")
    replace_once(source / CUDA_KERNELS, OTHER_ABI_LINE, OTHER_ABI_LINE.replace(" cuda", " EXCLUDE_FROM_ALL cuda"))
    headers = source / "unipar_headers/torch"
    headers.mkdir(parents=True)
    for name in ("torch.h", "extension.h"):
        (headers / name).write_text(TORCH_HEADER, encoding="utf-8")
    if torch.hip or (plan.cuda is None and not {"gloo", "mpi"}.issuperset(plan.names)):
        return  # ROCm, or a CUDA that the user's own variables lead to: Horovod's own search finds it
    (source / "cmake/Modules/FindPytorch.cmake").write_text(find_torch_text(torch, plan), encoding="utf-8")
    if not plan.cuda:
        replace_once(source / PATCHED_FILES[0], PROJECT_LINE, PROJECT_LINE + WITHOUT_CUDA)


def recipe_key() -> str:
    """Return a short checksum of this recipe, by which a wheel in the cache shows how it was compiled."""
    return hashlib.sha256((Path(__file__).read_text("utf-8") + _units_text()).encode()).hexdigest()[:8]


def _units_text() -> str:
    return (files("unipar_horovod") / "units.cmake").read_text("utf-8")


def find_torch_text(torch: TorchBuild, plan: BuildFeatures) -> str:
    """Return the text of FindPytorch.cmake for this torch, for CUDA where the plan has it."""
    headers, libraries = torch.site / "torch/include", torch.site / "torch/lib"
    include = [headers, headers / "torch/csrc/api/include"]
    linked = [libraries / f"lib{name}.so" for name in ("c10", "torch", "torch_cpu", "torch_python")]
    if plan.cuda:
        include.append(plan.cuda / "include")
        linked += [plan.cuda / "lib64/libcudart.so", libraries / "libc10_cuda.so", libraries / "libtorch_cuda.so"]
    return FIND_TORCH.format(
        version=torch.version,
        cuda=str(plan.cuda is not None).upper(),
        include=";".join(map(str, include)),
        libraries_in=libraries,
        libraries=";".join(map(str, linked)),
        abi=str(torch.abi).upper(),
        abi_number=int(torch.abi),
    )


def patch_cxx_standard(source: Path, standard: int) -> None:
    """Replace C++14, in both places that ask for it, by the standard that torch was compiled with."""
    for name in PATCHED_FILES:
        replace_once(source / name, CXX_STANDARD_LINE, CXX_STANDARD_LINE.replace("14", str(standard)))


def replace_once(file: Path, old: str, new: str) -> None:
    """Replace `old`, which must be in the file once; raise BackendNotInstalled where it is not."""
    text = file.read_text("utf-8")
    if text.count(old) != 1:
        raise BackendNotInstalled(
            f"{file.name} of horovod {HOROVOD_VERSION} does not hold {old.strip()!r} once: it is not the source "
            "that was released"
        )
    file.write_text(text.replace(old, new), encoding="utf-8")
