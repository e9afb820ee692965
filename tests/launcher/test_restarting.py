"""Runs that are killed and start again, and runs that are stopped while they save."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.foreign_launch import CONFIG as FOREIGN
from tests.support.forks import Forks
from tests.support.world import PYTHONPATH_VARIABLE, eventually
from unipar.checkpoint.protocol.verifying import find_checkpoints, verify_checkpoint
from unipar.errors import (
    CheckpointError,
    ConfigError,
    Hung,
    NonFinite,
    OutOfMemory,
    Stopped,
    TaskError,
    UniparError,
    Unsupported,
    WorkerFailed,
)
from unipar.launcher.restarting import is_worth_restart, pause_before
from unipar.run_folder.run_attempts import read_attempts
from unipar.run_folder.run_log import RunLog

ENVIRONMENT = {**PYTHONPATH_VARIABLE, "OMP_NUM_THREADS": "1"}

DIES = """
import os, signal
from pathlib import Path
import unipar
from tests.support.tiny import CONFIG, Tiny

class Dies(Tiny):
    def train(self, run):
        for local_batch in run.batches():
            run.step(local_batch)
            mark = Path(f"died-{run.done}")
            if run.rank == 1 and str(run.done) in os.environ["DIES"].split() and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    config = {**CONFIG, "log": {"every": 1}, "launch": {"restarts": 2}, "checkpoint": {"every": 3, "async": False}}
    try:
        unipar.launch(config, task=Dies)
    except unipar.UniparError as e:
        print(e)
        raise SystemExit(e.code)
"""

SAVES = """
import os, sys, time
import unipar
from tests.support.tiny import CONFIG, Tiny

class Slow(Tiny):
    def train(self, run):
        import unipar.checkpoint.protocol.save_checkpoint as publishing
        write = publishing._Saving.write_shard
        def slowly(*given):
            print("saving", run.done, flush=True)
            for _ in range(30):
                time.sleep(0.1)
                run.mark("save")
            return write(*given)
        publishing._Saving.write_shard = slowly
        for local_batch in run.batches():
            run.step(local_batch)
            time.sleep(0.02)

if __name__ == "__main__":
    config = {**CONFIG, "train": {**CONFIG["train"], "steps": 5000}, "data": {"workers": 1}, "log": {"every": 9999}}
    config["checkpoint"] = {"every": None, "async": sys.argv[1] == "async"}
    config["launch"] = {"shutdown_timeout": 1, "deadline": sys.argv[2] if len(sys.argv) > 2 else None}
    try:
        unipar.launch(config, task=Slow)
    except unipar.Stopped as e:
        print(e)
        raise SystemExit(e.code)
"""


def rows(run: Path, rank: int = 0) -> list[dict[str, Any]]:
    return list(RunLog.read(run / f"rank-{rank}.jsonl"))


def test_killed_ranks_start_again(forks: Forks, tmp_path: Path) -> None:
    """A killed rank: the run goes on from its newest checkpoint, each step is logged once, the reasons are kept."""
    (tmp_path / "script.py").write_text(DIES, "utf-8")
    done = forks.python(["script.py"], tmp_path, {**ENVIRONMENT, "DIES": "2 8"})
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs/run"
    for rank in (0, 1):
        assert sum(row["event"] == "start" for row in rows(run, rank)) == 2  # of the first attempt nothing is left
    assert [row["step"] for row in rows(run) if row["event"] == "step"] == list(range(1, 13))
    assert [(r["step"], r["attempt"]) for r in rows(run) if r["event"] == "continued"] == [(0, 2), (6, 3)]
    first, second = read_attempts(run)
    assert (first.step, first.kind, first.ranks, first.strategy) == (2, "WorkerFailed", 2, "native/nothing")
    assert (second.step, second.kind) == (8, "WorkerFailed")
    log = (run / "attempt-2/rank-1.log").resolve()
    assert log.exists()
    assert second.message.endswith(f"\n  its log: {log}")
    said = [line for line in done.stderr.splitlines() if line.startswith("restart ")]
    assert said == [
        "restart 1 of 2 in 1 s: it begins anew, as it has no checkpoint yet; logs so far: runs/run/attempt-1",
        "restart 2 of 2 in 2 s: it goes on from its newest whole checkpoint, of step 6 or before; "
        "logs so far: runs/run/attempt-2",
    ]
    shown = [line for line in done.stderr.splitlines() if line.startswith("goes on after step")]
    assert len(shown) == 1
    assert sum(line.startswith("step 7/12") for line in done.stderr.splitlines()) == 2
    assert "rank 1 was killed by SIGKILL after step 8" in done.stderr


def test_no_restart_is_left(forks: Forks, tmp_path: Path) -> None:
    """After the last restart the error is the run's."""
    script = DIES.replace('"restarts": 2', '"restarts": 1').replace("and not mark.exists()", "")
    (tmp_path / "script.py").write_text(script, "utf-8")
    done = forks.python(["script.py"], tmp_path, {**ENVIRONMENT, "DIES": "4"})
    assert done.returncode == 1
    assert "\nlaunch.restarts: 1 restart made, none left\n" in done.stderr
    assert done.stdout.startswith("rank 1 was killed by SIGKILL after step 4")
    assert json.loads((tmp_path / "runs/run/error.json").read_bytes())["kind"] == "WorkerFailed"


def test_a_signal_ends_the_wait_for_a_restart(forks: Forks, tmp_path: Path) -> None:
    """Ctrl-C before the restart: no rank is started, and the sentence says where the state is."""
    (tmp_path / "script.py").write_text(DIES, "utf-8")
    run = tmp_path / "runs/run"
    with forks.begin(["script.py"], tmp_path, {**ENVIRONMENT, "DIES": "4 5"}) as process:
        eventually(lambda: "restart 2 of 2 in 2 s" in process.stderr, "it did not come so far", 60)
        os.kill(process.pid, signal.SIGINT)
        done = process.wait()
    assert done.returncode == 130
    assert done.stdout == (
        f"stopped by SIGINT after step 5; what was logged is in {run}; its state after step 3 is in "
        "runs/run/checkpoints/step-00000003: go on from there with --resume\n"
    )


@pytest.mark.parametrize("how", ["async", "sync"])
def test_a_stop_waits_for_a_slow_save(how: str, forks: Forks, tmp_path: Path) -> None:
    """SIGUSR1 with DataLoader workers: saving takes longer than launch.shutdown_timeout, and is waited for."""
    (tmp_path / "script.py").write_text(SAVES, "utf-8")
    run = tmp_path / "runs/run"
    with forks.begin(["script.py", how], tmp_path, ENVIRONMENT) as process:
        eventually(lambda: any(row["event"] == "step" for row in rows(run)), "it did not come so far", 60)
        os.kill(process.pid, signal.SIGUSR1)
        done = process.wait()
    assert done.returncode == 130, done.stderr
    (found,) = find_checkpoints(run / "checkpoints")
    assert verify_checkpoint(found.path).state["step"] == found.step
    assert done.stdout.splitlines()[-1] == (
        f"stopped by SIGUSR1 after step {found.step}; what was logged is in {run}; its state is in "
        f"runs/run/checkpoints/step-{found.step:08d}: go on with --resume"
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.sweep)])
def test_a_second_signal_in_a_save(number: signal.Signals, forks: Forks, tmp_path: Path) -> None:
    """The second one ends the run at once: nothing is published, nothing half is taken for a checkpoint."""
    (tmp_path / "script.py").write_text(SAVES, "utf-8")
    run = tmp_path / "runs/run"
    with forks.begin(["script.py", "sync"], tmp_path, ENVIRONMENT) as process:
        eventually(lambda: any(row["event"] == "step" for row in rows(run)), "it did not come so far", 60)
        os.kill(process.pid, number)
        eventually(lambda: "saving" in (run / "rank-0.out").read_text("utf-8"), "it did not come so far", 60)
        began = time.monotonic()
        os.kill(process.pid, number)
        done = process.wait()
    assert time.monotonic() - began < 2.5
    assert done.returncode == 130
    assert not find_checkpoints(run / "checkpoints")
    assert done.stdout.splitlines()[-1].startswith(f"stopped by {number.name} after step ")
    assert done.stdout.splitlines()[-1].endswith("; its state is lost: no checkpoint was saved before")


@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.sweep), signal.SIGUSR1])
def test_a_signal_to_all_processes(number: signal.Signals, forks: Forks, tmp_path: Path) -> None:
    """As schedulers send it: ranks, their data workers and the launcher get it, and the state is saved all the same."""
    (tmp_path / "script.py").write_text(SAVES.replace("range(30)", "range(1)"), "utf-8")
    run = tmp_path / "runs/run"
    with forks.begin(["script.py", "sync"], tmp_path, ENVIRONMENT) as process:
        eventually(lambda: any(row["event"] == "step" for row in rows(run)), "it did not come so far", 60)
        ranks = [row["pid"] for rank in (0, 1) for row in rows(run, rank) if row["event"] == "start"]
        workers = [pid for rank in ranks for pid in children(rank)]
        assert len(workers) == 2
        for pid in (*workers, *ranks, process.pid):
            os.kill(pid, number)
        done = process.wait()
    assert done.returncode == 130, done.stderr
    (found,) = find_checkpoints(run / "checkpoints")
    assert f"stopped by {number.name} after step {found.step};" in done.stdout


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text("ascii").split()]


def test_a_deadline(forks: Forks, tmp_path: Path) -> None:
    """launch.deadline: rank 0's clock stops all ranks at one step, the state is saved, exit code 130."""
    (tmp_path / "script.py").write_text(SAVES.replace("range(30)", "range(1)"), "utf-8")
    run = tmp_path / "runs/run"
    done = forks.python(["script.py", "async", "2.5s"], tmp_path, ENVIRONMENT)
    assert done.returncode == 130, done.stderr
    stops = [row for rank in (0, 1) for row in rows(run, rank) if row["event"] == "stopped"]
    assert [row["why"] for row in stops] == ["launch.deadline", "launch.deadline"]
    assert stops[0]["step"] == stops[1]["step"]
    step = stops[0]["step"]
    assert done.stdout.splitlines()[-1] == (
        f"stopped by launch.deadline after step {step}; what was logged is in {run}; its state is in "
        f"runs/run/checkpoints/step-{step:08d}: go on with --resume"
    )


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (WorkerFailed("x"), True),
        (Hung("x"), True),
        (OutOfMemory("x"), True),
        (ConfigError("x"), False),
        (TaskError("x"), False),
        (NonFinite("x"), False),
        (Stopped("x"), False),
        (CheckpointError("x"), False),
        (Unsupported("x", ["y"]), False),
    ],
)
def test_errors_that_are_worth_a_restart(error: UniparError, again: bool) -> None:
    """What would fail again is not tried again."""
    assert is_worth_restart(error) is again


def test_pauses_double_up_to_a_minute() -> None:
    """1, 2, 4, ... seconds."""
    assert [pause_before(n) for n in (1, 2, 3, 6, 7, 8, 5000)] == [1, 2, 4, 32, 60, 60, 60]


SMALL = """
checkpoint: {every: 4, async: false}
"""


def foreign(forks: Forks, folder: Path, restart: int, steps: int, *more: str) -> list[Any]:
    """Two ranks as torchrun starts them, for the nth time."""
    words = ["-m", "unipar", "run", "x.yaml", "--set", f"train.steps={steps}", *more]
    return forks.ranks(words, folder, {**ENVIRONMENT, "TORCHELASTIC_RESTART_COUNT": str(restart)})


def test_torchrun_restarts_in_the_folder_of_its_first_attempt(forks: Forks, tmp_path: Path) -> None:
    """From its newest checkpoint, with --overwrite too; a run of another job with that name is left alone."""
    (tmp_path / "x.yaml").write_text(FOREIGN + SMALL, "utf-8")
    for rank in foreign(forks, tmp_path, 0, 6):
        assert rank.returncode == 0, rank.stderr
    other = tmp_path / "runs/x-2"
    other.mkdir()
    for name in ("config.json", "launch.json"):
        text = (tmp_path / "runs/x" / name).read_text("utf-8")
        (other / name).write_text(
            text.replace("torchrun tests", "torchrun else").replace("torchrun agent", "x"), "utf-8"
        )
    for rank in foreign(forks, tmp_path, 1, 9, "--overwrite"):
        assert rank.returncode == 0, rank.stderr
    assert sorted(os.listdir(tmp_path / "runs")) == ["x", "x-2"]
    steps = [(r["event"], r["step"]) for r in rows(tmp_path / "runs/x") if r["event"] in ("step", "continued")]
    assert steps == [("step", 1), ("step", 6), ("continued", 6), ("step", 9)]
    assert len(read_attempts(tmp_path / "runs/x")) == 1


def test_torchrun_restarts_without_checkpoints(forks: Forks, tmp_path: Path) -> None:
    """Refused, with the way out; `resume: never` begins anew in the same folder."""
    (tmp_path / "x.yaml").write_text(FOREIGN, "utf-8")
    assert [rank.returncode for rank in foreign(forks, tmp_path, 0, 6)] == [0, 0]
    for rank in foreign(forks, tmp_path, 2, 6):
        assert rank.returncode == 2
        assert (
            "torchrun has restarted this run (2), and its config has no section checkpoint, so there is no state to go "
            "on from: give it the section, or `resume: never`, which begins anew each time"
        ) in " ".join(rank.stderr.split())
    assert [rank.returncode for rank in foreign(forks, tmp_path, 3, 7, "--set", "resume=never")] == [0, 0]
    assert os.listdir(tmp_path / "runs") == ["x"]
    assert [r["step"] for r in rows(tmp_path / "runs/x") if r["event"] == "step"] == [1, 6, 7]


def test_slurm_requeues_a_batch_script(forks: Forks, tmp_path: Path) -> None:
    """A job that starts again goes on; another job of the same name begins a run of its own."""
    (tmp_path / "x.yaml").write_text(FOREIGN + SMALL, "utf-8")

    def job(number: int, restarts: int, steps: int) -> None:
        words = ["-m", "unipar", "run", "x.yaml", "--set", f"train.steps={steps}"]
        variables = {"SLURM_JOB_ID": str(number), **({"SLURM_RESTART_COUNT": str(restarts)} if restarts else {})}
        done = forks.python(words, tmp_path, {**ENVIRONMENT, **variables})
        assert done.returncode == 0, done.stderr

    job(7, 0, 6)
    job(8, 0, 6)
    job(7, 1, 8)
    assert sorted(os.listdir(tmp_path / "runs")) == ["x", "x-2"]
    assert [r["step"] for r in rows(tmp_path / "runs/x") if r["event"] == "step"] == [1, 6, 8]
    assert not read_attempts(tmp_path / "runs/x-2")
