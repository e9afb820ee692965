"""`unipar install horovod` where it must refuse, and what it tells the build; a real build is part of set-up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from unipar_horovod import install, recipe, run_command, toolchain
from unipar_horovod import install as unipar_horovod_install
from unipar_horovod import toolchain as unipar_horovod_toolchain
from unipar_horovod.toolchain import BuildFeatures, TorchBuild

from unipar import errors
from unipar.cli.commands.backends import install_backend as unipar_install

TORCH = TorchBuild(version="2.13.0+cpu", standard=20, abi=True)
CUDA = TorchBuild(version="2.13.0+cu130", standard=20, abi=True, cuda="13.0")
ROOT = Path(__file__).parents[2]

# Another test may have imported a library, and with it distutils, in this process: the command is one of its own.
pytestmark = pytest.mark.filterwarnings("ignore:Setuptools is replacing distutils")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache and a temporary folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path / "cache" / "unipar"


def tool(folder: Path, name: str, says: str = "") -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\necho '{says}'\n", encoding="utf-8")
    (folder / name).chmod(0o755)


def test_all_that_is_missing_is_named_at_once(tmp_path: Path) -> None:
    """One list, a remedy for each."""
    said = toolchain.list_missing("torch, which cannot be imported: no (pip install torch)", {}, str(tmp_path))
    assert said == [
        "torch, which cannot be imported: no (pip install torch)",
        "a C++ compiler, g++ (apt install g++)",
        "make (apt install make)",
        "cmake 3.13 or newer (pip install cmake)",
    ]


def test_an_old_cmake_is_missing(tmp_path: Path) -> None:
    """Found, and too old: both are said."""
    for name in ("g++", "make"):
        tool(tmp_path / "bin", name)
    tool(tmp_path / "bin", "cmake", "cmake version 3.9.6")
    (said,) = toolchain.list_missing(TORCH, {}, str(tmp_path / "bin"))
    assert (
        said == f"cmake 3.13 or newer, found {tmp_path}/bin/cmake that says ['cmake version 3.9.6'] (pip install cmake)"
    )


def test_nvcc_is_needed_where_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A build for CPU tensors needs none; one that the user's variable asks for does."""
    monkeypatch.setattr(toolchain, "find_nvcc", lambda *_: "")  # pyright: ignore[reportUnknownLambdaType]
    for name, says in (("g++", ""), ("make", ""), ("cmake", "cmake version 4.0.1")):
        tool(tmp_path / "bin", name, says)
    assert toolchain.list_missing(CUDA, {}, str(tmp_path / "bin")) == []
    (said,) = toolchain.list_missing(CUDA, {"HOROVOD_GPU_OPERATIONS": "NCCL"}, str(tmp_path / "bin"))
    assert said == "for HOROVOD_GPU_OPERATIONS=NCCL, nvcc (pip install nvidia-cuda-nvcc==13.0.*)"


def test_python_packages_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A setuptools that is too new, and modules that are not there, by the names they are installed under."""
    monkeypatch.setattr(unipar_horovod_toolchain, "version", lambda _: "84.2.1")  # pyright: ignore[reportUnknownLambdaType]
    gone = ("pip", "yaml", "wheel")
    monkeypatch.setattr(toolchain, "find_spec", lambda name: None if name in gone else name)  # pyright: ignore[reportUnknownLambdaType]
    assert toolchain.list_missing(TORCH)[-3:] == [
        f"pip ({sys.executable} -m ensurepip)",
        "setuptools below 81, found 84.2.1 (pip install 'setuptools<81')",
        "wheel, pyyaml (pip install wheel pyyaml)",
    ]


def test_the_refusal_is_one_paragraph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Missing tools stop the installation before anything is fetched."""
    monkeypatch.setattr(unipar_horovod_install, "query_torch", lambda: TORCH)
    needed = ["make (apt install make)", "g++ (apt install g++)"]
    monkeypatch.setattr(unipar_horovod_install, "list_missing", lambda _: needed)  # pyright: ignore[reportUnknownLambdaType]
    with pytest.raises(errors.BackendNotInstalled) as told:
        unipar_install("horovod")
    assert str(told.value) == (
        "horovod 0.28.1 cannot be built yet; install what is missing: make (apt install make); g++ (apt install g++)"
    )


@pytest.mark.parametrize(
    ("shown", "standard"), [("  - C++ Version: 202002\n", 20), ("  - C++ Version: 201703\n", 17), ("nothing", 17)]
)
def test_the_standard_is_torchs(shown: str, standard: int) -> None:
    """The standard is read from the text of torch.__config__.show()."""
    assert toolchain.cxx_standard_of(shown) == standard


def test_torch_is_asked() -> None:
    """The torch of this environment says who it is."""
    import torch

    here = toolchain.query_torch()
    assert isinstance(here, TorchBuild)
    assert here.version == torch.__version__
    assert (here.site / "torch").is_dir()


def test_a_changed_archive_is_not_unpacked(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checksum is compared with the released one's, for an archive in the cache, too."""
    (cache / "sources").mkdir(parents=True)
    archive = cache / "sources" / "horovod-0.28.1.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(ROOT / "pyproject.toml", "horovod-0.28.1/CMakeLists.txt")
    monkeypatch.setattr(unipar_horovod_install, "_is_installed", lambda: False)
    with pytest.raises(errors.BackendNotInstalled) as told:
        install.install_horovod()
    assert str(told.value).startswith(f"{archive} is not horovod 0.28.1 as released: its sha256 is ")
    assert f"not {install.HOROVOD_SHA256}; remove it, try again" in str(told.value)
    assert list(tmp_path.glob("unipar-horovod-*")) == []


def test_the_key_holds_what_a_wheel_depends_on() -> None:
    """Another torch, ABI, standard, option or recipe is another wheel."""
    first = toolchain.wheel_key("0.28.1", TORCH, ("gloo",), "1a2b")
    assert first.startswith("horovod-0.28.1_torch-2.13.0+cpu_cxx20_abi1_cpython-3")
    assert first.endswith("_gloo_1a2b")
    others = [
        toolchain.wheel_key("0.28.1", CUDA, ("gloo",), "1a2b"),
        toolchain.wheel_key("0.28.1", TorchBuild(version="2.13.0+cpu", standard=17, abi=True), ("gloo",), "1a2b"),
        toolchain.wheel_key("0.28.1", TorchBuild(version="2.13.0+cpu", standard=20, abi=False), ("gloo",), "1a2b"),
        toolchain.wheel_key("0.28.1", TORCH, ("gloo", "mpi"), "1a2b"),
        toolchain.wheel_key("0.28.1", TORCH, ("gloo",), "3c4d"),
        toolchain.wheel_key("0.29.0", TORCH, ("gloo",), "1a2b"),
    ]
    assert len({first, *others}) == 7


def test_gloo_always_and_mpi_where_it_is(tmp_path: Path) -> None:
    """mpicxx on the path means MPI; without it the build is told not to look."""
    assert toolchain.find_features(TORCH, tmp_path, {}, "") == BuildFeatures(("gloo",), {"HOROVOD_WITHOUT_MPI": "1"})
    tool(tmp_path / "bin", "mpicxx")
    found = toolchain.find_features(TORCH, tmp_path, {}, str(tmp_path / "bin"))
    assert found == BuildFeatures(("gloo", "mpi"), {"HOROVOD_WITH_MPI": "1"}, found=True)


def test_an_mpi_without_headers_is_left_out(tmp_path: Path) -> None:
    """Debian's openmpi-bin brings mpicxx without mpi.h: the build goes on without MPI, and that is said."""
    tool(tmp_path / "bin", "mpicxx", "fatal error: mpi.h: No such file or directory'; exit '1")
    assert toolchain.find_features(TORCH, tmp_path, {}, str(tmp_path / "bin")) == BuildFeatures(
        ("gloo",),
        {"HOROVOD_WITHOUT_MPI": "1"},
        notes=(f"without MPI, as {tmp_path}/bin/mpicxx finds no mpi.h",),
    )


def test_asked_options_are_obeyed(tmp_path: Path) -> None:
    """Horovod's own variables win over what is found, and stay where the rest is dropped."""
    tool(tmp_path / "bin", "mpicxx")
    path = str(tmp_path / "bin")
    assert toolchain.find_features(TORCH, tmp_path, {"HOROVOD_WITHOUT_MPI": "1"}, path) == BuildFeatures(("gloo",), {})
    assert toolchain.features_asked_for(CUDA, tmp_path, {"HOROVOD_GPU_OPERATIONS": "NCCL"}).names == ("gloo", "nccl")


def test_the_first_error_is_the_one_that_is_told(tmp_path: Path) -> None:
    """Not the last of a thousand lines, and all of them are in the log."""
    words = "[ 10%] a\na.cc:7: error: no such thing\nb.cc:9: error: because of that\nmake: *** [all] Error 2\n"
    log, told = tmp_path / "log", list[int]()
    with pytest.raises(run_command.CommandFailed) as failed:
        run_command.run_logged(["sh", "-c", f"echo '{words}'; exit 2"], log=log, say=told.append)
    assert str(failed.value) == "a.cc:7: error: no such thing"
    assert log.read_text("utf-8").endswith(f"{words}\n")
    assert told == [10]


def test_progress_counts_what_is_finished() -> None:
    """Two compilers: make names the third unit when one of the first two has ended."""
    shown = list[int]()
    say = run_command.count_finished(shown.append, 2)
    for begun in (16, 33, 50, 66, 83, 100):
        say(begun)
    assert shown == [16, 33, 50, 100]


def test_a_failed_build_is_one_sentence(tmp_path: Path) -> None:
    """The sentence names the failed step, the first error and the log."""
    with pytest.raises(errors.BackendNotInstalled) as told:
        install._run_or_explain(  # pyright: ignore[reportPrivateUsage]
            ["sh", "-c", "echo a.cc:7: error: no such thing; exit 2"], tmp_path / "log", "it could not be built"
        )
    assert str(told.value) == (
        "horovod 0.28.1 was not installed: it could not be built: a.cc:7: error: no such thing "
        f"(the whole log: {tmp_path / 'log'})"
    )


def test_a_cmake_error_is_told_with_its_next_line(tmp_path: Path) -> None:
    """The first line of CMake's error names the place only; the next one the reason."""
    words = "CMake Error at CMakeLists.txt:1 (cmake_minimum_required):\n  Compatibility with CMake < 3.5 is gone.\n"
    with pytest.raises(
        run_command.CommandFailed, match=r"\(cmake_minimum_required\): Compatibility with CMake < 3.5 is"
    ):
        run_command.run_logged(["sh", "-c", f"echo '{words}'; exit 1"], log=tmp_path / "log")


def test_what_does_not_run_is_uninstalled(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wheel that fails its self-test stays neither in the environment nor in the cache, and its log is kept."""
    kept = cache / "wheels" / toolchain.wheel_key("0.28.1", TORCH, ("gloo",), recipe.recipe_key())
    kept.mkdir(parents=True)
    (kept / "horovod-0.28.1-py3-none-any.whl").touch()
    ran: list[list[str]] = []

    def run(command: list[str], *, log: Path, **_: object) -> str:
        ran.append(command)
        log.touch()
        if "unipar_horovod.self_test" in command:
            raise run_command.CommandFailed("rank 1: ImportError: undefined symbol: _ZN3c10")
        return ""

    for name, value in (("query_torch", lambda: TORCH), ("_is_installed", lambda: False), ("run_logged", run)):
        monkeypatch.setattr(install, name, value)
    monkeypatch.setattr(unipar_horovod_install, "find_features", lambda *_: BuildFeatures(("gloo",), {}))  # pyright: ignore[reportUnknownLambdaType]
    with pytest.raises(errors.BackendNotInstalled) as told:
        install.install_horovod()
    assert str(told.value).startswith(
        "horovod 0.28.1 was installed, failed its self-test, and was uninstalled again: "
        "rank 1: ImportError: undefined symbol: _ZN3c10; `unipar install horovod --force` builds it anew (the "
        "full log: "
    )
    assert ran[-1][-3:] == ["uninstall", "-y", "horovod"]
    assert list(kept.iterdir()) == []
    assert len(list((cache / "logs").iterdir())) == 1


def test_a_signal_in_the_midst_of_a_start_ends_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Popen has begun the process and not yet returned: the signal waits until somebody can end what was begun."""
    begun: list[subprocess.Popen[str]] = []
    start = subprocess.Popen

    def start_and_signal(*args: Any, **options: Any) -> subprocess.Popen[str]:
        begun.append(start(*args, **options))
        signal.raise_signal(signal.SIGINT)
        return begun[0]

    monkeypatch.setattr(subprocess, "Popen", start_and_signal)
    with pytest.raises(KeyboardInterrupt):
        run_command.run_logged(["sleep", "60"], log=tmp_path / "log")
    assert begun[0].returncode == -signal.SIGINT
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def alive(word: str) -> Iterator[str]:
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = process.read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if word in text and "python" not in text:
            yield text


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_takes_the_build_along(tmp_path: Path, sign: signal.Signals) -> None:
    """Ctrl-C in a compilation: its processes end, its folder and its log go."""
    mark = f"987{os.getpid()}"
    code = f"""
import tempfile
from unipar_horovod import install, toolchain
from unipar.cli.commands.backends import install_backend
install.query_torch = lambda: toolchain.TorchBuild(version="2.13.0+cpu", standard=20, abi=True)
install._is_installed = lambda: False
install._get_wheel = lambda torch, wanted, folder, log, force: install._run_or_explain(
    ["sh", "-c", "sleep {mark} & touch {tmp_path}/begun; wait"], log, "")
try:
    install_backend("horovod")
except KeyboardInterrupt:
    raise SystemExit(130)
"""
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache"), "TMPDIR": str(tmp_path)}
    child = subprocess.Popen([sys.executable, "-c", code], env=environment)
    until = time.monotonic() + 60
    while not (tmp_path / "begun").exists() and time.monotonic() < until:
        time.sleep(0.02)
    child.send_signal(sign)
    assert child.wait(30) == 130
    until = time.monotonic() + 20  # a killed process is seen for a moment
    while list(alive(mark)) and time.monotonic() < until:
        time.sleep(0.02)
    assert list(alive(mark)) == []
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == [tmp_path / "begun"]
    assert list(tmp_path.glob("unipar-horovod-*")) == []


@pytest.mark.sweep
def test_the_installed_one_is_proved() -> None:
    """Two processes of the installed Horovod sum a tensor; launchers' variables do not reach them."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "unipar_horovod.self_test"],
        env=install.without_horovod_variables(os.environ | {"HOROVOD_RANK": "7"}),
        capture_output=True,
        text=True,
        check=True,
    )
    assert '"gloo": true' in done.stdout


def test_nothing_to_build_for_the_others() -> None:
    """The way to get them is said instead."""
    with pytest.raises(
        errors.Unsupported, match=r"deepspeed: there is nothing to build: pip install 'unipar\[deepspeed\]'"
    ):
        unipar_install("deepspeed")


def test_one_version_in_two_places() -> None:
    """constraints.txt says the version that is built."""
    assert f"horovod=={install.HOROVOD_VERSION}\n" in (ROOT / "constraints.txt").read_text("utf-8")
