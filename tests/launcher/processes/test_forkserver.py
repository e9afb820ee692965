"""The fork server itself; groups of its forks are in test_group.py beside those of new processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.support.world import PYTHONPATH_VARIABLE, ROOT, eventually, is_running, read_pid, short_folder
from unipar.launcher.processes.forkserver import ForkServer, ForkServerFailed
from unipar.launcher.processes.group import WorkerGroup


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Generator[None]:
    """After tmp_path: pytest's own folders are not ours."""
    with short_folder(monkeypatch):
        yield


def test_it_ends_with_its_context() -> None:
    """And only then."""
    with ForkServer(["json"]) as server:
        pid = server.pid
        assert is_running(pid)
    assert not is_running(pid)


def test_cuda_is_not_started_by_a_question() -> None:
    """Libraries ask torch at import for GPUs; if torch started CUDA for the answer, no fork could use it."""
    with ForkServer(["json"]) as server:
        server.wait_until_ready()
        assert b"PYTORCH_NVML_BASED_CUDA_CHECK=1" in Path(f"/proc/{server.pid}/environ").read_bytes().split(b"\0")


def test_what_cannot_be_imported() -> None:
    """The library's own error is shown."""
    with (
        pytest.raises(ForkServerFailed, match="No module named 'no_such_module'") as e,
        ForkServer(["json", "no_such_module"]) as server,
    ):
        server.wait_until_ready()
    assert e.value.module == "no_such_module"


def test_a_long_error(tmp_path: Path) -> None:
    """Its end is shown: the whole would not fit into a message."""
    (tmp_path / "long_error.py").write_text(
        "raise ImportError('\\U0001f600' * 200_000 + ' at the end')", encoding="utf-8"
    )
    with (
        pytest.raises(ForkServerFailed, match="at the end") as e,
        ForkServer(["long_error"], {"PYTHONPATH": f"{ROOT}:{tmp_path}"}) as server,
    ):
        server.wait_until_ready()
    assert e.value.module == "long_error"


def test_threads_are_refused() -> None:
    """A fork would take one thread along and leave the locks of the others behind."""
    with (
        pytest.raises(ForkServerFailed, match="2 threads; a module that starts threads"),
        ForkServer(["tests.support.threaded"], PYTHONPATH_VARIABLE) as server,
    ):
        server.wait_until_ready()


def test_forks_are_fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has its parent's modules and nothing of the worlds before it; environment and folder are the asker's."""
    with ForkServer(["tests.support.entries"], PYTHONPATH_VARIABLE) as server:
        monkeypatch.chdir(tmp_path)  # after it has started
        for name in ("first", "second"):
            (tmp_path / name).mkdir()
            more = {**PYTHONPATH_VARIABLE, "NAMED": name}
            workers = WorkerGroup(
                tmp_path / name, 1, "tests.support.entries:remembers", environment=more, starter=server
            )
            with workers:
                workers.wait()
            assert (tmp_path / name / "remembered").read_text("utf-8") == f"['{name}'] {tmp_path} True"


PARENT = """
import sys
import time
from pathlib import Path
from unipar.launcher.processes.forkserver import ForkServer
from unipar.launcher.processes.group import WorkerGroup
with ForkServer(["tests.support.entries"]) as server:
    Path(sys.argv[1], "server").write_text(str(server.pid))
    with WorkerGroup(Path(sys.argv[1]), 1, "tests.support.entries:sleeps", starter=server) as workers:
        workers.wait()
"""


def test_it_dies_with_its_parent(tmp_path: Path) -> None:
    """kill -9: server and forks."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path)], env={**os.environ, **PYTHONPATH_VARIABLE}, cwd=ROOT
    )
    fork, server = read_pid(tmp_path / "up-0"), read_pid(tmp_path / "server")
    parent.kill()
    parent.wait()
    eventually(lambda: not is_running(fork) and not is_running(server), "something lives on")


def test_a_server_that_was_killed(tmp_path: Path) -> None:
    """Asking it is an error with a sentence, and its forks still end with their workers."""
    with ForkServer(["tests.support.entries"], PYTHONPATH_VARIABLE) as server:
        workers = WorkerGroup(
            tmp_path, 1, "tests.support.entries:sleeps", environment=PYTHONPATH_VARIABLE, starter=server
        )
        workers.__enter__()
        fork = read_pid(tmp_path / "up-0")
        os.kill(server.pid, signal.SIGKILL)
        with pytest.raises(ForkServerFailed, match=r"^the fork server has ended \(exit code -9\)$"):
            workers.kill()
        eventually(lambda: not is_running(fork), "the fork lives on")
        assert workers.running_pids == {}


def test_a_signal_to_all_processes_of_a_job() -> None:
    """The server lives on, as ranks that save need it to the end."""
    with ForkServer(["json"], PYTHONPATH_VARIABLE) as server:
        server.wait_until_ready()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            os.kill(server.pid, number)
        time.sleep(0.2)
        assert server.running
