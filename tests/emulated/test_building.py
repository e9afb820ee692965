"""Compilation of the emulated device: once for its sources, and a reason where it cannot be."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.softcuda import build
from tests.support.softcuda.processes import EmulatedDevice

ROOT = Path(__file__).parents[2]


def test_built_once(emulated: EmulatedDevice) -> None:
    """The folder is named after torch, Python and the sources, and holds two libraries."""
    folder = build.library_folder()
    assert folder.name.startswith(f"cuda-torch-{build.version('torch')}-cpython-")
    assert sorted(file.name for file in folder.iterdir()) == ["_softcuda.so", "libsoftcuda.so"]


def test_a_change_of_the_sources_builds_again(
    emulated: EmulatedDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another byte in a source is another folder, and so is another kind of device."""
    before = build.library_folder().name
    shutil.copytree(build.SOURCES, tmp_path, dirs_exist_ok=True)
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    assert build._key("cuda") == before  # pyright: ignore[reportPrivateUsage]
    (tmp_path / "order.cpp").write_bytes(b"// other\n")
    assert build._key("cuda") != before  # pyright: ignore[reportPrivateUsage]
    assert build._key("npu").startswith("npu-torch-")  # pyright: ignore[reportPrivateUsage]


def test_another_installation_of_torch_builds_again(
    emulated: EmulatedDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The libraries know where torch is: those of an environment that was removed are not taken."""
    before = build.library_folder().name
    monkeypatch.setattr(build, "_torch_folder", lambda: tmp_path)
    assert build._key("cuda") != before  # pyright: ignore[reportPrivateUsage]


def test_no_compiler(tmp_path: Path) -> None:
    """Tests of the emulated device are skipped with the reason."""
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-rs",
        "-p",
        "no:cacheprovider",
        "-n",
        "0",
        "-m",
        "not gpu",
        "tests/emulated/test_profiles.py",
    ]
    environment = {**os.environ, "CXX": "no-such-compiler", "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(
        [*words, "-k", "nvml"], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert "no C++ compiler: the emulated device is compiled with g++" in done.stdout, done.stdout + done.stderr
    assert "2 skipped" in done.stdout


def test_nothing_without_the_variable() -> None:
    """A process with the folder on its path, and no profile, has torch as it is."""
    code = "import torch, sys; print(torch.cuda.is_available(), 'tests.support.softcuda.activation' in sys.modules)"
    path = os.pathsep.join([str(ROOT / "tests/support/softcuda/site"), str(ROOT)])
    environment = {name: value for name, value in os.environ.items() if name != "SOFTCUDA"} | {"PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"
