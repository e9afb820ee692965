"""Code in no file: recognised, pickled, and sent to workers through a pipe."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.support.forks import Forks
from tests.support.tiny import Tiny
from tests.support.world import PYTHONPATH_VARIABLE, eventually
from unipar.errors import TaskError
from unipar.launcher.processes.group import WorkerGroup
from unipar.task.pickled import is_without_file, pickle_task, send_task

SCRIPT = """
import torch, unipar
from tests.support.tiny import CONFIG, Tiny

class Mine(Tiny):
    def loss(self, model, batch):
        return shift + super().loss(model, batch)

shift = 1.0
report = unipar.launch(CONFIG, task=Mine, overrides={"out": "out"}, quiet=True)
print(round(report.losses[-1][1], 4), report.size)
"""


@pytest.mark.parametrize("words", [pytest.param(["-"], marks=pytest.mark.sweep), ["-c", SCRIPT]], ids=["stdin", "-c"])
def test_a_class_without_a_file(words: list[str], tmp_path: Path, forks: Forks) -> None:
    """A class from stdin or `-c` trains in two ranks, with globals that were set after its definition."""
    if words == ["-"]:
        environment = {**os.environ, **PYTHONPATH_VARIABLE, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-"]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, input=SCRIPT, capture_output=True, text=True, check=False
        )
    else:
        done = forks.python(words, tmp_path, PYTHONPATH_VARIABLE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "4.3857 2"
    assert sorted(name for name in os.listdir(tmp_path / "out") if "rank" not in name) == ["config.json", "launch.json"]


def measured(run: Path, size: int) -> None:
    with WorkerGroup(
        run, size, "tests.support.entries:handed", pickled_task=pickle_task("zeros", b"0" * 5_000_000)
    ) as workers:
        workers.wait()


def test_more_than_a_pipe_holds(tmp_path: Path) -> None:
    """Five megabytes reach each of two workers, and none of it is in the run folder."""
    measured(tmp_path, 2)
    assert [(tmp_path / f"seen-{rank}").read_text("utf-8") for rank in (0, 1)] == ["5000000", "5000000"]
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 100


def test_a_worker_that_is_gone() -> None:
    """A worker that has ended does not keep the next one from its task, and the thread ends."""
    gone, first = os.pipe()
    reader, second = os.pipe()
    os.close(gone)
    send_task(b"mine", [first, second])
    assert os.read(reader, 64) == (4).to_bytes(8) + b"mine"
    assert os.read(reader, 64) == b""
    os.close(reader)
    eventually(lambda: not [t for t in threading.enumerate() if t.name == "send-task"], "a thread is left")


def test_what_cannot_be_packed() -> None:
    """An object that cannot be pickled is refused in a sentence with the ways out."""
    with pytest.raises(TaskError) as e:
        pickle_task("Mine", {"lock": threading.Lock()})
    assert str(e.value) == (
        "Mine cannot be sent to other processes: cannot pickle '_thread.lock' object; create such objects in its "
        "methods, which each rank calls for itself, or put it into a file and import it from there"
    )


def test_what_is_in_a_file_is_found_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Only code of __main__ that is in no file counts as typed in."""
    assert not is_without_file(Tiny)
    script, typed_in = dict[str, Any](__name__="__main__"), dict[str, Any](__name__="__main__")
    text = "class Mine:\n    def model(self): ...\nclass Empty: ...\n"
    exec(compile(text, str(tmp_path / "script.py"), "exec"), script)
    exec(compile(text, "<stdin>", "exec"), typed_in)
    main = type(sys)("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert is_without_file(script["Mine"])
    assert is_without_file(script["Empty"])
    (tmp_path / "script.py").touch()
    main.__file__ = str(tmp_path / "script.py")
    assert not is_without_file(script["Mine"])
    assert not is_without_file(script["Empty"])
    assert is_without_file(typed_in["Mine"])  # after `python -i script.py`
