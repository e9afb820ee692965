"""`launch` and `join`: from a config or a script to a finished run, and every refusal to start."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import unipar
from tests.support.forks import Forks
from tests.support.tiny import CONFIG, Tiny
from tests.support.world import PYTHONPATH_VARIABLE, ROOT, SOON, eventually
from unipar.backend.checks import given_source
from unipar.distributed.launchers import Launcher
from unipar.errors import OutExists, Stopped, TaskError, Unsupported, WorkerFailed
from unipar.launcher import rerun
from unipar.launcher.preparation.prepare import check_launcher_serves
from unipar.launcher.processes.process import SubprocessStarter
from unipar.run_folder.run_log import RunLog

ENVIRONMENT = {**PYTHONPATH_VARIABLE, "OMP_NUM_THREADS": "1"}

Python = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def python(forks: Forks, tmp_path: Path) -> Python:
    """Run a script as the user would, a file from its own folder: in a fork, or `new`, in a new interpreter."""

    def run(script: str, *words: str, new: bool = False) -> subprocess.CompletedProcess[str]:
        (tmp_path / "script.py").write_text(script, encoding="utf-8")
        if not new:
            return forks.python(["script.py", *words], tmp_path, ENVIRONMENT)
        command = [sys.executable, "script.py", *words]
        environment = {**os.environ, **ENVIRONMENT}
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=120
        )

    return run


# launch

TWICE = """
import unipar
from tests.support.tiny import CONFIG, Tiny

first = unipar.launch(CONFIG, task=Tiny, overrides={"out": "a"})
print("first", first.steps)
try:
    unipar.launch(CONFIG, task=Tiny, overrides={"out": "a"})
except unipar.OutExists:
    print("refused")

class Other(Tiny):
    def model(self):
        import torch
        print("model of Other")
        return torch.nn.Linear(4, 1, bias=False)

second = unipar.launch(CONFIG, task=Other, overrides={"out": "b"})
print("second", second.steps, first.parameters, second.parameters)
try:
    unipar.launch(CONFIG, task=Other, overrides={"out": "a"}, overwrite=True, quiet=True)
except unipar.TaskError as e:
    print(e)
"""


def test_two_launches_and_no_guard(python: Python, tmp_path: Path) -> None:
    """Workers import the calling script, come past its earlier launches as it did, and stop at their own."""
    done = python(TWICE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "trained 12",
        "first 12",
        "refused",
        "model of Other",
        "trained 12",
        "second 12 5 4",
        "the run in a was overwritten by a later one; put launches under if __name__ == '__main__'",
    ]
    assert "Traceback" not in done.stderr
    assert "12 steps in " in done.stderr
    assert sorted(os.listdir(tmp_path / "b")) == [
        "config.json",
        "launch.json",
        "rank-0.beat",
        "rank-0.jsonl",
        "rank-0.log",
        "rank-0.out",
        "rank-1.beat",
        "rank-1.jsonl",
        "rank-1.log",
    ]


ARGUMENTS = """
import argparse, sys
import torch, unipar
from tests.support.tiny import CONFIG, Tiny

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=3)
args, depth, extra = parser.parse_args(), 4, None

class Wide(Tiny):
    def model(self):
        assert sys.argv[1:] == ["--width", "16"]
        print("model of", args.width, depth, extra)
        return torch.nn.Sequential(torch.nn.Linear(4, args.width), torch.nn.Linear(args.width, depth, bias=False))

if __name__ == "__main__":
    depth, more = 64, {"train.steps": 2, "out": "out"}
    extra = parser.parse_args(["--width", "5"])
    print(unipar.launch(CONFIG, task=Wide, overrides=more, quiet=True).parameters)
    extra = unipar.verify(CONFIG, task=Wide, overrides=more, steps=2, strategies=["native/nothing"])
    print(extra.code, extra.rows[0].outcome)
    extra = torch.nn.ReLU()
    try:
        unipar.launch(CONFIG, task=Wide, overrides={**more, "out": "other"}, quiet=True)
    except unipar.TaskError as e:
        print(e)
"""


def test_arguments_and_variables_of_the_script(python: Python) -> None:
    """Ranks have the script's arguments, and what its main block has set, or they say what they lack."""
    done = python(ARGUMENTS, "--width", "16")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "model of 16 64 Namespace(width=5)",
        "trained 2",
        str(4 * 16 + 16 + 16 * 64),
        "0 agrees",
        "the task reads extra of script.py, which is a ReLU in the script, and None in its ranks, which "
        'import the file without its `if __name__ == "__main__"` block; such a value cannot be sent to them: set it '
        "above the block, or create it in the task's methods, from task.args",
    ]


NO_OUT = """
import unipar
from tests.support.tiny import CONFIG, Tiny

if __name__ == "__main__":
    for _ in range(2):
        print(unipar.launch(CONFIG, task=Tiny).out)
    print(unipar.launch(CONFIG, task=Tiny, overwrite=True).out)
    try:
        unipar.launch(CONFIG, task=Tiny, overrides={"out": "runs/run-2"})
    except unipar.OutExists as e:
        print(e)
"""


def test_a_folder_for_each_run(python: Python, tmp_path: Path) -> None:
    """Without `out` each run takes the next name and says so first; `overwrite` means the first one."""
    done = python(NO_OUT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        *("trained 12", "runs/run", "trained 12", "runs/run-2", "trained 12", "runs/run"),
        "out: runs/run-2 already exists; name another folder (out: another/folder, or --out DIR), "
        "or overwrite it (--overwrite, or launch(..., overwrite=True))",
    ]
    said = done.stderr.splitlines()
    assert said[0] == "run folder: runs/run"
    assert [line for line in said if line.startswith("run folder")] == [
        *("run folder: runs/run", "run folder: runs/run-2", "run folder: runs/run")
    ]
    assert sorted(os.listdir(tmp_path / "runs")) == ["run", "run-2"]
    assert json.loads((tmp_path / "runs/run-2/config.json").read_bytes())["out"] == "runs/run-2"


def test_functions_instead_of_a_task_and_one_rank_fails(python: Python, tmp_path: Path) -> None:
    """Errors arrive where launch was called, with the rank's own traceback, also if nobody catches them."""
    script = """
import torch, unipar
from tests.support.tiny import CONFIG, Tiny

def model(): return torch.nn.Linear(4, 1)
def data(): return Tiny().data()
def loss(model, batch):
    if torch.distributed.get_rank() == 1: raise ArithmeticError("no loss here")
    return model(batch[0]).mean()

if __name__ == "__main__":
    unipar.launch(CONFIG, model=model, data=data, loss=loss, overrides={"out": "out"}, quiet=True)
"""
    done = python(script)
    assert done.returncode == 1
    assert (
        "WorkerFailed: rank 1 failed: ArithmeticError: no loss here (script.py:8, in loss)\n"
        f"  its log: {tmp_path}/out/rank-1.log\n"
    ) in done.stderr
    _, _, own = done.stderr.partition("Rank 1's own traceback:")
    first, place, *_ = own.strip().splitlines()
    assert (first, place) == ("Traceback (most recent call last):", f'  File "{tmp_path}/script.py", line 8, in loss')


@pytest.mark.parametrize("to", ["parent", "one rank"])
def test_stopped_by_a_signal(to: str, forks: Forks, tmp_path: Path) -> None:
    """SIGTERM to the parent or to a rank: all ranks stop at one step boundary; what was logged is whole."""
    script = f"""
import unipar
from tests.support.tiny import CONFIG, Tiny
if __name__ == "__main__":
    task = {{"use": "{ROOT}/tests/support/tiny.py:Tiny", "args": {{"pause": 0.01}}}}
    unipar.launch(CONFIG, overrides={{"out": "out", "train.steps": 100000, "task": task}})
"""
    (tmp_path / "script.py").write_text(script, encoding="utf-8")
    run_logs = [tmp_path / "out" / f"rank-{rank}.jsonl" for rank in (0, 1)]
    with forks.begin(["script.py"], tmp_path, ENVIRONMENT) as process:
        eventually(lambda: all(x.exists() and '"step": 1,' in x.read_text("utf-8") for x in run_logs), "no step", 60)
        began = time.monotonic()
        os.kill(process.pid if to == "parent" else next(RunLog.read(run_logs[1]))["pid"], signal.SIGTERM)
        said = process.wait().stderr
    assert time.monotonic() - began < SOON
    report = unipar.Report.read(tmp_path / "out")
    assert report.stopped is not None
    by = "SIGTERM" if to == "parent" else "a signal to its ranks"
    assert (
        f"Stopped: stopped by {by} after step {report.stopped}; what was logged is in {tmp_path}/out; its state is "
        "lost: a section checkpoint in the config would have kept it\n"
    ) in said
    steps = [[line for line in x.read_text("utf-8").splitlines() if '"stopped"' in line] for x in run_logs]
    assert [f'"step": {report.stopped}' in rank[0] for rank in steps] == [True, True]


def test_a_rank_that_hangs_in_training(python: Python, tmp_path: Path) -> None:
    """The other rank waits inside DDP's backward, and is not blamed."""
    script = f"""
import unipar
from tests.support.tiny import CONFIG
task = {{"use": "{ROOT}/tests/support/tiny.py:Tiny", "args": {{"hangs_on": 1}}}}
if __name__ == "__main__":
    try:
        unipar.launch(CONFIG, overrides={{"out": "out", "launch": {{"heartbeat": 1.0}}, "task": task}}, quiet=True)
    except unipar.Hung as e:
        print(e)
"""
    done = python(script)
    assert done.stdout.startswith("rank 1 hung in step 4 (forward): no sign of life for 1 s; it is at "), done.stderr
    waits = r"rank 0 waits in all_reduce of float \[5\] \(collective \d+ of group default_pg\)"
    assert re.search(rf"/tiny.py:\d+ in loss; {waits}, which rank 1 has not begun\n", done.stdout)


def test_a_backend_whose_library_is_broken(python: Python, tmp_path: Path) -> None:
    """The rank's own error is raised with its own type and exit code."""
    broken = tmp_path / "broken" / "deepspeed"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('libcuda.so.1: cannot open')", encoding="utf-8")
    script = f"""
import sys, unipar
from tests.support.tiny import CONFIG, Tiny
if __name__ == "__main__":
    sys.path.insert(0, "{broken.parent}")
    try:
        unipar.launch({{**CONFIG, "backend": "deepspeed"}}, task=Tiny, overrides={{"out": "out"}}, quiet=True)
    except unipar.BackendNotInstalled as e:
        print(e.code, e)
"""
    done = python(script, new=True)
    assert "3 backend 'deepspeed' is installed and cannot be imported (libcuda.so.1: cannot open)" in done.stdout, (
        done.stderr
    )


# join

JOINS = """
import sys
import unipar
from tests.support.tiny import CONFIG, Tiny

print("before")
task = Tiny()
more = {"parallel.data": int(sys.argv[1]), "out": "out"}
with unipar.join(CONFIG, model=task.model, loss=task.loss, overrides=more) as run:
    for local_batch in run.over(task.data()):
        step = run.step(local_batch)
        if sys.argv[2:] == ["fail"] and run.rank == 1:
            raise KeyError("labels")
    print("rank", run.rank, "of", run.size, "at", step.step)
print("after", sys.argv)
"""


def test_join_with_two_ranks(python: Python, tmp_path: Path) -> None:
    """The script runs once more in each rank; its caller goes no further than join, and rank 0's prints are seen."""
    done = python(JOINS, "2", new=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["before", "before", "rank 0 of 2 at 12", "after ['script.py', '2']"]
    assert "rank 1 of 2 at 12" in (tmp_path / "out" / "rank-1.log").read_text("utf-8")


def test_a_folder_for_each_script_that_joins(python: Python, tmp_path: Path) -> None:
    """One world of two ranks that are started, then one of this process alone: the same names."""
    script = JOINS.replace(', "out": "out"', "")
    for ranks in ("2", "1"):
        done = python(script, ranks)
        assert done.returncode == 0, done.stderr
    assert "run folder: runs/run-2\n" in done.stderr
    found = {name: unipar.Report.read(tmp_path / "runs" / name) for name in os.listdir(tmp_path / "runs")}
    assert {name: (report.size, report.steps) for name, report in found.items()} == {"run": (2, 12), "run-2": (1, 12)}


def test_join_with_one(python: Python, tmp_path: Path) -> None:
    """A world of one needs no other process."""
    done = python(JOINS, "1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["before", "rank 0 of 1 at 12", "after ['script.py', '1']"]
    assert not (tmp_path / "out" / "rank-0.log").exists()


def test_join_and_a_rank_fails(python: Python, tmp_path: Path) -> None:
    """The caller ends with the sentence and the rank's traceback, and an exit code."""
    done = python(JOINS, "2", "fail")
    assert done.returncode == 1
    assert done.stderr.endswith(
        f"unipar: rank 1 failed: KeyError: 'labels' (script.py:13, in <module>)\n  its log: {tmp_path}/out/rank-1.log\n"
    )
    assert 'script.py", line 13, in <module>' in done.stderr


def test_join_needs_something_to_train() -> None:
    """Said before anything starts."""
    with pytest.raises(TaskError, match=r"^join needs model= and loss=, or a task=$"), unipar.join(CONFIG):
        pass


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["python", "a.py", "-m", "x"], ["script", "a.py", "-m", "x"]),
        (["python", "-X", "dev", "-Werror", "-u", "a.py"], ["script", "a.py"]),
        (["python", "-um", "pkg.train", "--lr", "1"], ["module", "pkg.train", "--lr", "1"]),
        (["python", "-mpkg"], ["module", "pkg"]),
        (["python", "--check-hash-based-pycs", "always", "a.py"], ["script", "a.py"]),
    ],
)
def test_what_was_typed(
    words: Sequence[str], found: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python's own flags are told from the script and its arguments."""
    (tmp_path / "a.py").touch()
    monkeypatch.chdir(tmp_path)
    assert rerun.find_script_command(words) == found


@pytest.mark.parametrize(
    ("words", "where"),
    [(["python"], "a prompt or a notebook"), (["python", "-c", "x"], "a -c command"), (["python", "-"], "a prompt")],
)
def test_no_script_to_run_again(words: Sequence[str], where: str) -> None:
    """The error names launch."""
    with pytest.raises(TaskError, match=rf"and this is {where}.*: put the loop into a file, or use launch\(\)"):
        rerun.find_script_command(words)


# Refused, before any process


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a worker was started")

    monkeypatch.setattr(SubprocessStarter, "start", refuse)


@pytest.mark.usefixtures("nothing_starts")
def test_out_exists(tmp_path: Path) -> None:
    """Both ways out are named; nothing is touched."""
    (tmp_path / "config.json").write_text("old", "utf-8")
    with pytest.raises(OutExists) as raised:
        unipar.launch(CONFIG, task=Tiny, overrides={"out": str(tmp_path)})
    assert str(raised.value) == (
        f"out: {tmp_path} already exists; name another folder (out: another/folder, or --out DIR), "
        "or overwrite it (--overwrite, or launch(..., overwrite=True))"
    )
    assert (tmp_path / "config.json").read_text("utf-8") == "old"


@pytest.mark.usefixtures("nothing_starts")
def test_a_folder_that_is_not_a_runs(tmp_path: Path) -> None:
    """overwrite=True does not remove somebody's photographs."""
    (tmp_path / "photo.jpg").touch()
    with pytest.raises(
        OutExists, match=r"is not a run folder of unipar \(no config.json in it\), so it is not overwritten"
    ):
        unipar.launch(CONFIG, task=Tiny, overrides={"out": str(tmp_path)}, overwrite=True)
    assert (tmp_path / "photo.jpg").exists()


@pytest.mark.usefixtures("nothing_starts")
def test_out_is_a_file(tmp_path: Path) -> None:
    """The file is left alone."""
    (tmp_path / "file").touch()
    with pytest.raises(OutExists, match="is a file; name another folder"):
        unipar.launch(CONFIG, task=Tiny, overrides={"out": str(tmp_path / "file")}, overwrite=True)


@pytest.mark.usefixtures("nothing_starts")
def test_a_run_that_still_goes_on(tmp_path: Path) -> None:
    """A live run's folder is not overwritten."""
    (tmp_path / "config.json").write_text('{"batch": {}, "train": {}}', "utf-8")
    (tmp_path / "launch.json").write_text('{"task": {}}', "utf-8")
    owner = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(owner, fcntl.LOCK_EX)
    with pytest.raises(OutExists, match="is in use by a run that has not ended; wait for its end"):
        unipar.launch(CONFIG, task=Tiny, overrides={"out": str(tmp_path)}, overwrite=True)
    os.close(owner)


@pytest.mark.usefixtures("nothing_starts")
def test_batches_that_do_not_divide(tmp_path: Path) -> None:
    """And nothing is written."""
    with pytest.raises(unipar.ConfigError, match=r"batch.total \(7\) is not a multiple of accumulate x data"):
        unipar.launch(CONFIG, task=Tiny, overrides={"out": str(tmp_path / "x"), "batch.total": 7})
    assert not (tmp_path / "x").exists()


def test_a_launcher_made_for_other_backends() -> None:
    """With the command to use instead."""
    ring = Launcher(name="ringrun", order=1, marks=(), rank="", size="", local_rank="", local_size="", serves=("ring",))
    with pytest.raises(Unsupported) as raised:
        check_launcher_serves(ring, given_source(CONFIG))
    assert str(raised.value) == (
        "native/nothing: ringrun starts ring only; start the same script with `torchrun --nproc-per-node N`, "
        "or with `python`, and unipar starts its ranks itself"
    )


def test_errors_that_are_exit_codes() -> None:
    """Errors hold the exit code of the command line."""
    assert (OutExists.code, WorkerFailed.code, Stopped.code) == (2, 1, 130)
