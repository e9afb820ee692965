"""One worker: arguments, recorded errors, prints, and its end with the parent."""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests.support.world import PYTHONPATH_VARIABLE, short_folder
from unipar.errors import TaskError, WorkerFailed
from unipar.launcher.processes.group import WorkerGroup
from unipar.launcher.processes.process import SubprocessStarter
from unipar.launcher.processes.worker_arguments import PARENT_GONE_EXIT_CODE, WorkerArguments
from unipar.launcher.worker_stdout import WorkerStdout
from unipar.run_folder.error_file import write_error
from unipar.run_folder.layout import error_path, stdout_path
from unipar.task.reference import TaskRef

ORDERS = WorkerArguments(
    rank=1,
    size=2,
    local_rank=1,
    local_size=2,
    parent=3,
    dies_with_thread=0,
    parent_alive_fd=4,
    control=5,
    run="/a b/c=d",
    entry="x:y",
    folder="/tmp/unipar-1",
)


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Generator[None]:
    """After tmp_path: pytest's own folders are not ours."""
    with short_folder(monkeypatch):
        yield


def test_orders_travel_as_words() -> None:
    """Paths with blanks and equals signs too; what is not given keeps its default."""
    assert WorkerArguments.read(ORDERS.to_command_line()) == ORDERS
    assert ORDERS.listener == -1


def test_a_worker_without_its_parent_ends_at_once() -> None:
    """A parent that died before the worker could ask the kernel to be told."""
    command = [sys.executable, "-m", "unipar.launcher.processes.worker", *ORDERS.to_command_line()]
    assert (
        subprocess.run(command, env={**os.environ, **PYTHONPATH_VARIABLE}, check=False).returncode
        == PARENT_GONE_EXIT_CODE
        == 113
    )


def test_importing_the_worker_loads_no_torch() -> None:
    """Its first act must come soon."""
    code = "import sys, unipar.launcher.processes.worker; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], env={**os.environ, **PYTHONPATH_VARIABLE}, check=False).returncode
        == 0
    )


TOP = """
import argparse, unipar
parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=3)
args, depth = parser.parse_args(), 4

class Mine(unipar.Task):
    def model(self): return args.width, depth
    def data(self): ...
    def loss(self, model, batch): ...
"""


def test_a_new_interpreter_has_the_scripts_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker's own arguments are not those that the task's file reads; what the script has set arrives."""
    (tmp_path / "top_of_script.py").write_text(TOP, "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "argv", ["top.py", "--width", "16"])
    script: Any = importlib.import_module("top_of_script")
    script.depth = 64
    (tmp_path / "ref.json").write_text(json.dumps(TaskRef.of(script.Mine, None, {}).to_json()), "utf-8")
    with WorkerGroup(tmp_path, 1, "tests.support.entries:loads_a_task", starter=SubprocessStarter()) as workers:
        workers.wait()
    assert (tmp_path / "seen-0").read_text("utf-8") == "(16, 64) ['top.py', '--width', '16']"


def test_the_first_error_is_kept(tmp_path: Path) -> None:
    """What fails while a worker ends does not cover up why it ends."""
    write_error(tmp_path, 0, TaskError("there is no loss"))
    write_error(tmp_path, 0, RuntimeError("closing failed"))
    said = json.loads(error_path(tmp_path, 0).read_text("utf-8"))
    assert (said["kind"], said["message"]) == ("TaskError", "there is no loss")
    assert said["traceback"] == "unipar.errors.TaskError: there is no loss\n"
    assert os.listdir(tmp_path) == ["rank-0.error.json"]


def test_prints_go_two_ways(tmp_path: Path) -> None:
    """print reaches the log and whoever shows it; what libraries log stays in the log."""
    with (tmp_path / "log").open("w", encoding="utf-8") as log:
        prints = WorkerStdout(log, tmp_path)
        with contextlib.redirect_stdout(prints):
            print("mine")
        handler = logging.StreamHandler(prints)
        handler.emit(logging.makeLogRecord({"msg": "a library's", "levelno": logging.INFO}))
        prints.flush()
    assert stdout_path(tmp_path).read_text("utf-8") == "mine\n"
    assert (tmp_path / "log").read_text("utf-8") == "mine\na library's\n"


def test_prints_are_a_stdout_like_any_other(tmp_path: Path) -> None:
    """Bytes go both ways, in their turn; what else a stdout has is the log's: other ranks have it too."""
    with (tmp_path / "log").open("w", encoding="utf-8") as log:
        prints = WorkerStdout(log, tmp_path)
        prints.reconfigure(line_buffering=True)
        prints.write("a ")
        assert prints.buffer.write("ü\n".encode()) == 3
        prints.write("b\n")
        assert (log.line_buffering, prints.line_buffering, prints.mode) == (True, True, "w")
        prints.flush()
    assert stdout_path(tmp_path).read_text("utf-8") == "a ü\nb\n"
    assert (tmp_path / "log").read_text("utf-8") == "a ü\nb\n"


@pytest.mark.parametrize(
    ("how", "code"),
    [("exits_well", None), ("exits_with_code", "SystemExit: 4"), ("exits_with_words", "SystemExit: no")],
)
def test_sys_exit(tmp_path: Path, how: str, code: str | None) -> None:
    """0 ends a rank well; anything else is a failure with its words."""
    with WorkerGroup(tmp_path, 1, f"tests.support.entries:{how}", environment=PYTHONPATH_VARIABLE) as workers:
        if code is None:
            workers.wait()
        else:
            with pytest.raises(WorkerFailed, match=rf"^rank 0 failed: {code} \(.+, in {how}\)\n"):
                workers.wait()


def test_output_is_in_the_ranks_log(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Of Python and of what is below it; none of it on the terminal."""
    with WorkerGroup(tmp_path, 2, "tests.support.entries:speaks", environment=PYTHONPATH_VARIABLE) as workers:
        workers.wait()
    assert sorted((tmp_path / "rank-1.log").read_text("utf-8").split()) == ["below", "err", "out"]
    assert capfd.readouterr() == ("", "")
