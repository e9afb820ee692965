"""One fork server for several backends, and those that cannot be in it."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.world import PYTHONPATH_VARIABLE, eventually, is_running
from unipar.config import Config
from unipar.launcher.processes import starters
from unipar.launcher.processes.forkserver import ForkServer
from unipar.launcher.processes.process import SubprocessStarter
from unipar.launcher.processes.starters import SharedForkServer, may_fork

ENGINES = {
    "fine_library": "",
    "broken_library": "raise ImportError('libbroken.so is missing')",
    "threaded_library": "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()",
    "slow_library": "import time\ntime.sleep(60)",
}


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Function that returns the backend of a library by its name; torch is left out."""
    for name, text in ENGINES.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("", encoding="utf-8")
        (tmp_path / name / "engine.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(starters, "COMMON_MODULES", ("json",))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{PYTHONPATH_VARIABLE['PYTHONPATH']}")

    def backend(name: str) -> Any:
        return type("Backend", (), {"__module__": name, "name": name, "requires": ("torch", name)})()

    return backend


def test_a_library_that_cannot_be_there(library: Any) -> None:
    """Its workers are new interpreters, with the reason; those of the others are forks of one process."""
    fine, broken, threaded = (library(name) for name in ("fine_library", "broken_library", "threaded_library"))
    with SharedForkServer(["unipar.errors"], {"ANY": "thing"}) as server:
        server.start([broken, fine, threaded])
        forks = server.starter_of(fine)
        assert isinstance(forks, ForkServer)
        assert isinstance(server.starter_of(broken), SubprocessStarter)
        assert isinstance(server.starter_of(threaded), SubprocessStarter)
        assert server.why_separate(fine) == ""
        began = "its processes started as new interpreters, not as forks: "
        assert server.why_separate(broken) == began + "ImportError: libbroken.so is missing"
        assert server.why_separate(threaded) == (
            began + "RuntimeError: 2 threads; a module that starts threads must be imported in the workers"
        )
        assert server.summary == "libraries are imported, once for all strategies: torch, fine_library"
    assert not is_running(forks.pid)


def test_a_server_that_was_killed_is_started_again(library: Any) -> None:
    """Strategies whose turn comes later need not fail with it."""
    fine = library("fine_library")
    with SharedForkServer(["unipar.errors"], {"ANY": "thing"}) as server:
        server.start([fine])
        first = server.starter_of(fine).pid
        os.kill(first, signal.SIGKILL)
        eventually(lambda: not is_running(first), "it lives on")
        assert server.starter_of(fine).pid != first


def test_imports_that_hang(library: Any) -> None:
    """After some time new interpreters start, and the watch over them says where they hang."""
    slow = library("slow_library")
    looked: list[int] = []
    with SharedForkServer(["unipar.errors"], {"ANY": "thing"}, patience=0.5) as server:
        server.start([slow], lambda: looked.append(1))
        assert isinstance(server.starter_of(slow), SubprocessStarter)
        assert server.why_separate(slow).endswith("not as forks: its imports took more than 0.5 s")
        assert server.summary == ""
    assert looked


@pytest.mark.parametrize(
    ("device", "launch", "may"), [("cpu", {}, True), ("cuda", {}, False), ("cpu", {"fork": False}, False)]
)
def test_where_workers_are_forks(device: str, launch: dict[str, Any], may: bool, library: Any) -> None:
    """On the CPU, unless the config says no."""
    train = {"steps": 1, "optimizer": {"name": "sgd", "lr": 0.1}}
    config = Config.model_validate({"batch": {"total": 8}, "train": train, "launch": launch})
    assert may_fork(config, device) is may
    with SharedForkServer(["unipar.errors"], use=False) as server:
        server.start([library("fine_library")])
        assert isinstance(server.starter_of(library("fine_library")), SubprocessStarter)
        assert server.why_separate(library("fine_library")) == ""


def test_libraries_see_no_gpu(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some choose their device when they are imported, and forks compute on the CPU."""
    seen: list[dict[str, str]] = []

    def see(modules: Any, environment: dict[str, str]) -> Any:
        seen.append(environment)
        raise KeyboardInterrupt

    monkeypatch.setattr(starters, "ForkServer", see)
    with pytest.raises(KeyboardInterrupt), SharedForkServer(["unipar.errors"], {"ANY": "thing"}) as server:
        server.start([library("fine_library")])
    assert seen == [{"ANY": "thing", "CUDA_VISIBLE_DEVICES": ""}]
