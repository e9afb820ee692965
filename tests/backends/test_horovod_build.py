"""What Horovod's build is given: its source with few large units, and CUDA's parts from wherever they are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
from unipar_horovod import cuda_parts, install, recipe, toolchain
from unipar_horovod.toolchain import BuildFeatures, TorchBuild

from unipar.errors import BackendNotInstalled

CPU = BuildFeatures(("gloo",), {})
RELEASED = {
    "CMakeLists.txt": "project(horovod CXX)\nset(CMAKE_CXX_STANDARD 14)\n",
    "horovod/torch/CMakeLists.txt": (
        "    set(CMAKE_CXX_STANDARD 14)\nadd_library(${PYTORCH_TARGET_LIB} SHARED ${SOURCES} ${PYTORCH_SOURCES})\n"
    ),
    "horovod/common/ops/cuda/CMakeLists.txt": (
        "set(CMAKE_CUDA_STANDARD 11)\nadd_library(compatible_horovod_cuda_kernels cuda_kernels.cu)\n"
    ),
    "cmake/Modules/FindPytorch.cmake": "execute_process(...)\n",
    recipe.GLOO_CONTEXT: f"before\n{recipe.PROCESS_SET_LINES}after\n",
}
"""Lines of the released source that the recipe changes."""

NEW_LAYOUT = {
    "cu13": ("include/cuda_runtime.h", "include/crt/host_config.h", "include/cccl/nv/target", "lib/libcudart.so.13"),
    "nccl": ("include/nccl.h", "lib/libnccl.so.2"),
}
"""Packages for CUDA 13 beside torch: one folder for all but NCCL."""

OLD_LAYOUT = {
    "cuda_runtime": ("include/cuda_runtime.h", "lib/libcudart.so.12"),
    "cuda_nvcc": ("include/crt/host_config.h",),
    "cuda_cccl": ("include/nv/target",),
    "nccl": ("include/nccl.h", "lib/libnccl.so.2"),
}
"""Packages for CUDA 12 beside torch: a folder for each."""


@pytest.fixture(autouse=True)
def no_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine's own CUDA is none of these tests' business."""
    monkeypatch.setattr(cuda_parts, "SYSTEM_ROOTS", ())


def source(tmp_path: Path) -> Path:
    for name, text in RELEASED.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def torch(site: Path = Path("/site"), cuda: str = "") -> TorchBuild:
    return TorchBuild(version="2.13.0", standard=20, abi=True, cuda=cuda, site=site)


def packages(site: Path, layout: Mapping[str, Iterable[str]]) -> Path:
    for package, names in layout.items():
        for name in names:
            file = site / "nvidia" / package / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("#!/bin/sh\n", encoding="utf-8")
            file.chmod(0o755)
    return site


def test_both_files_ask_for_torchs_standard(tmp_path: Path) -> None:
    """The top one, and torch's, which sets it again."""
    recipe.prepare_source(source(tmp_path), torch(), CPU)
    for name in ("CMakeLists.txt", "horovod/torch/CMakeLists.txt"):
        assert "set(CMAKE_CXX_STANDARD 20)" in (tmp_path / name).read_text("utf-8")


def test_process_sets_use_the_interface_that_they_are_told(tmp_path: Path) -> None:
    """Released, they take the one of the host's own name, which on Debian is loopback; a file marks the change."""
    recipe.prepare_source(source(tmp_path), torch(), CPU)
    assert (tmp_path / "horovod/common/gloo/gloo_context.cc").read_text("utf-8").splitlines()[:4] == [
        "before",
        "  gloo_iface_ = global_context.gloo_iface_;",
        "  attr device_attr;",
        "  device_attr.iface = gloo_iface_;",
    ]
    assert (tmp_path / "horovod/unipar_changes.py").exists()


def test_units_are_made_before_the_library_is_added(tmp_path: Path) -> None:
    """Horovod's own C++14 for what includes no header of torch's; no search for an nvcc that nothing needs."""
    recipe.prepare_source(source(tmp_path), torch(), CPU)
    assert (tmp_path / "horovod/torch/CMakeLists.txt").read_text("utf-8").splitlines()[1:] == [
        'set(UNIT_STANDARD "-std=c++14")',
        'include("${PROJECT_SOURCE_DIR}/cmake/units.cmake")',
        "add_library(${PYTORCH_TARGET_LIB} SHARED ${SOURCES} ${PYTORCH_SOURCES})",
    ]
    assert "macro(add_unit" in (tmp_path / "cmake/units.cmake").read_text("utf-8")
    assert "set(CMAKE_CUDA_COMPILER NOTFOUND)" in (tmp_path / "CMakeLists.txt").read_text("utf-8")
    assert "<ATen/core/Tensor.h>" in (tmp_path / "unipar_headers/torch/extension.h").read_text("utf-8")


def test_torch_is_described_instead_of_imported(tmp_path: Path) -> None:
    """The build's own search for torch holds what one question has answered."""
    recipe.prepare_source(source(tmp_path), torch(), CPU)
    found = (tmp_path / "cmake/Modules/FindPytorch.cmake").read_text("utf-8")
    assert 'set(Pytorch_VERSION "2.13.0")' in found
    assert "set(Pytorch_CUDA FALSE)" in found
    assert "libtorch_python.so" in found
    assert "cuda" not in found
    assert "execute_process" not in found


def test_cuda_is_linked_where_the_plan_has_it(tmp_path: Path) -> None:
    """Its headers, its run time and torch's libraries for it; one standard for all, as CUDA's headers need it."""
    plan = BuildFeatures(("gloo", "nccl"), {}, cuda=Path("/home"))
    recipe.prepare_source(source(tmp_path), torch(), plan)
    found = (tmp_path / "cmake/Modules/FindPytorch.cmake").read_text("utf-8")
    assert "set(Pytorch_CUDA TRUE)" in found
    assert "/home/include" in found
    assert "/home/lib64/libcudart.so;/site/torch/lib/libc10_cuda.so;/site/torch/lib/libtorch_cuda.so" in found
    assert 'set(UNIT_STANDARD "-std=c++20")' in (tmp_path / "horovod/torch/CMakeLists.txt").read_text("utf-8")
    assert (tmp_path / "horovod/common/ops/cuda/CMakeLists.txt").read_text("utf-8") == (
        "set(CMAKE_CUDA_STANDARD 20)\nadd_library(compatible_horovod_cuda_kernels EXCLUDE_FROM_ALL cuda_kernels.cu)\n"
    )
    assert "NOTFOUND" not in (tmp_path / "CMakeLists.txt").read_text("utf-8")


def test_a_cuda_of_the_users_own_is_searched_as_released(tmp_path: Path) -> None:
    """Variables that lead to parts which were not gathered here are left to Horovod's own search."""
    recipe.prepare_source(source(tmp_path), torch(cuda="13.0"), BuildFeatures(("gloo", "nccl"), {}))
    assert (tmp_path / "cmake/Modules/FindPytorch.cmake").read_text("utf-8") == "execute_process(...)\n"
    assert "NOTFOUND" not in (tmp_path / "CMakeLists.txt").read_text("utf-8")


def test_another_source_is_not_patched(tmp_path: Path) -> None:
    """A build that would die later in a compiler error is refused here."""
    file = source(tmp_path) / "CMakeLists.txt"
    file.write_text("set(CMAKE_CXX_STANDARD 17)\n", encoding="utf-8")
    with pytest.raises(
        BackendNotInstalled, match=r"CMakeLists.txt of horovod 0\.28\.1 does not hold 'set\(CMAKE_CXX_STANDARD 14\)' "
    ):
        recipe.prepare_source(tmp_path, torch(), CPU)


@pytest.mark.parametrize(("layout", "cuda"), [(NEW_LAYOUT, "13.0"), (OLD_LAYOUT, "12.8")])
def test_parts_of_cuda_come_with_torch(tmp_path: Path, layout: Mapping[str, Iterable[str]], cuda: str) -> None:
    """Both layouts of pip's packages give one folder with the names that CMake looks for."""
    site = packages(tmp_path / "site", layout)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/nvcc").write_text("#!/bin/sh\n", encoding="utf-8")
    (tmp_path / "bin/nvcc").chmod(0o755)
    plan = toolchain.find_features(
        torch(site, cuda), tmp_path / "links", {"HOROVOD_WITHOUT_MPI": "1"}, str(tmp_path / "bin")
    )
    home = tmp_path / "links/cuda"
    assert (plan.names, plan.cuda, plan.found, plan.notes) == (("gloo", "nccl"), home, True, ())
    assert plan.variables["HOROVOD_GPU_OPERATIONS"] == "NCCL"
    assert plan.variables["HOROVOD_CUDA_HOME"] == str(home)
    for header in ("cuda_runtime.h", "crt/host_config.h", "nv/target", "nccl.h"):
        assert (home / "include" / header).is_file()
    assert (home / "lib64/libcudart.so").resolve().name == f"libcudart.so.{cuda[:2]}"
    assert (home / "lib64/libnccl.so").resolve() == site / "nvidia/nccl/lib/libnccl.so.2"
    assert f"exec {tmp_path}/bin/nvcc -I{home}/include" in (home / "bin/nvcc").read_text("utf-8")


def test_a_missing_part_makes_a_build_for_cpu_tensors(tmp_path: Path) -> None:
    """Each missing part is named with the package that brings it."""
    site = packages(tmp_path / "site", {"cu13": NEW_LAYOUT["cu13"][:1]})
    plan = toolchain.find_features(torch(site, "13.0"), tmp_path / "links", {"HOROVOD_WITHOUT_MPI": "1"}, "")
    assert (plan.names, plan.cuda, plan.found) == (("gloo",), None, False)
    assert plan.notes == (
        "for CPU tensors only: for CUDA 13.0 it lacks nvcc (pip install nvidia-cuda-nvcc==13.0.*), "
        "crt/host_config.h (pip install nvidia-cuda-crt==13.0.*), nv/target (pip install nvidia-cuda-cccl==13.0.*), "
        "nccl.h (pip install nvidia-nccl-cu13), libcudart.so (pip install nvidia-cuda-runtime==13.0.*), "
        "libnccl.so (pip install nvidia-nccl-cu13)",
    )


def test_packages_of_cuda_12_have_other_names(tmp_path: Path) -> None:
    """They end in -cu12, and none brings nvcc."""
    parts = cuda_parts.find_cuda_parts("12.8", tmp_path, "", {})
    assert parts.missing[:3] == [
        "nvcc (the toolkit of CUDA 12.8)",
        "cuda_runtime.h (pip install nvidia-cuda-runtime-cu12==12.8.*)",
        "crt/host_config.h (pip install nvidia-cuda-nvcc-cu12==12.8.*)",
    ]


def test_nvcc_names_its_own_toolkit(tmp_path: Path) -> None:
    """The nvcc on the path is a script elsewhere: the folder that it names has the parts."""
    toolkit = packages(tmp_path, {"toolkit": NEW_LAYOUT["cu13"]}) / "nvidia/toolkit"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/nvcc").write_text(f"#!/bin/sh\necho '#$ TOP={toolkit}/bin/..' >&2\n", encoding="utf-8")
    (tmp_path / "bin/nvcc").chmod(0o755)
    (toolkit / "bin").mkdir()
    parts = cuda_parts.find_cuda_parts("13.0", tmp_path / "site", str(tmp_path / "bin"), {})
    assert parts.include == [toolkit / "include", toolkit / "include/cccl"]
    assert [part.split()[0] for part in parts.missing] == ["nccl.h", "libnccl.so"]


def test_what_the_user_asks_for_comes_first(tmp_path: Path) -> None:
    """HOROVOD_NCCL_LIB of the user's stays, and a build that was asked for is not given up for another."""
    site = packages(tmp_path / "site", {**OLD_LAYOUT, "toolkit": ("bin/nvcc",)})
    environ = {"HOROVOD_WITHOUT_MPI": "1", "HOROVOD_GPU_OPERATIONS": "NCCL", "HOROVOD_NCCL_LIB": "/mine"}
    plan = toolchain.find_features(torch(site, "12.8"), tmp_path / "links", environ, "")
    assert (plan.names, plan.found, plan.cuda) == (("gloo", "nccl"), False, tmp_path / "links/cuda")
    assert "HOROVOD_NCCL_LIB" not in plan.variables
    assert plan.variables["HOROVOD_CUDA_HOME"] == str(tmp_path / "links/cuda")


@pytest.mark.parametrize("fails", ["build", "self-test"])
def test_where_nccl_fails_it_is_built_for_cpu_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """A build that fails, or a library that cannot be imported: the next plan is tried, and the reason is said."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    wanted = BuildFeatures(("gloo", "nccl"), {}, found=True, cuda=tmp_path)

    def build(_: TorchBuild, plan: BuildFeatures, *rest: object) -> Path:
        if plan is wanted and fails == "build":
            raise BackendNotInstalled("a.cu:1: error: no")
        return tmp_path / "-".join(plan.names)

    def prove(wheel: install.Wheel, _: Path) -> None:
        if "nccl" in wheel.names and fails == "self-test":
            raise BackendNotInstalled("ImportError: libnccl.so.2")

    def nothing(*_: object) -> None: ...

    for name, value in (
        ("find_features", lambda *_: wanted),  # pyright: ignore[reportUnknownLambdaType]
        ("features_asked_for", lambda *_: CPU),  # pyright: ignore[reportUnknownLambdaType]
        ("_build_wheel", build),
        ("_run_or_explain", nothing),
        ("_prove_or_uninstall", prove),
    ):
        monkeypatch.setattr(install, name, value)
    said = install._build_and_install(torch(cuda="13.0"), tmp_path, tmp_path / "log", True)  # pyright: ignore[reportPrivateUsage]
    why = {"build": "a.cu:1: error: no", "self-test": "ImportError: libnccl.so.2"}[fails]
    assert said.startswith("horovod 0.28.1 for torch 2.13.0 is installed, with gloo (built here; ")
    assert said.endswith(
        f"; for CPU tensors only, without nccl, as the build with gloo, nccl failed: {why}: "
        "two processes summed a tensor with it over loopback"
    )


def test_another_recipe_is_another_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The key of the cache follows the text of the recipe."""
    before = recipe.recipe_key()
    monkeypatch.setattr(recipe, "_units_text", lambda: "add_unit()\n")
    assert recipe.recipe_key() != before
