"""Worlds that other launchers start: the same script, the same numbers, one report on every rank."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.foreign_launch import CONFIG
from tests.support.forks import Forks
from tests.support.launchers import LAUNCH_COMMANDS, environment, in_private_network, launch_command, reason_missing
from tests.support.world import eventually, is_running
from unipar.results.run_report import Report
from unipar.run_folder.run_log import RunLog
from unipar.utils.procfs import PARENT, process_stat

STRATEGIES = [
    pytest.param("torchrun", "native", marks=pytest.mark.sweep),
    pytest.param("torchrun", "deepspeed", marks=pytest.mark.sweep),
    pytest.param("accelerate launch", "accelerate", marks=pytest.mark.sweep),
    pytest.param("deepspeed", "deepspeed", marks=pytest.mark.sweep),
    pytest.param("horovodrun", "horovod", marks=pytest.mark.sweep),
    pytest.param("mpirun", "native", marks=pytest.mark.sweep),
    pytest.param("by hand", "native", marks=pytest.mark.sweep),
]
"""Each launcher and each backend; `make matrix` starts all of them together, and tests of machines one of a family."""


def command(launcher: str, *more: str) -> list[str]:
    if why := reason_missing(launcher):
        pytest.skip(why)
    return launch_command(launcher, "unipar", "run", *more)


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    made = environment(folder)
    return subprocess.run(command, cwd=folder, env=made, capture_output=True, text=True, check=False, timeout=120)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, forks: Forks) -> Report:
    """The same run in a world of ours."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "x.yaml").write_text(CONFIG, encoding="utf-8")
    done = forks.python(["-m", "unipar", "run", "x.yaml", "--set", "parallel.data=2"], folder)
    assert done.returncode == 0, done.stderr
    return Report.read(folder / "runs/x")


@pytest.mark.parametrize(("launcher", "backend"), STRATEGIES)
def test_joins(launcher: str, backend: str, tmp_path: Path, alone: Report) -> None:
    """`LAUNCHER -m unipar run`: two ranks, the losses of a world of ours, nothing of ours left but the run."""
    (tmp_path / "x.yaml").write_text(CONFIG, encoding="utf-8")
    done = run(command(launcher, "x.yaml", "--backend", backend), tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    _expect_joined(backend, tmp_path, alone, done.stdout, done.stderr)


def test_joins_ranks_that_torchrun_starts(tmp_path: Path, alone: Report, forks: Forks) -> None:
    """The same with torchrun's variables; torchrun itself is in the sweeps."""
    (tmp_path / "x.yaml").write_text(CONFIG, encoding="utf-8")
    both = forks.ranks(["-m", "unipar", "run", "x.yaml", "--backend", "native"], tmp_path)
    assert all(done.returncode == 0 for done in both), both
    stdout, stderr = "".join(done.stdout for done in both), "".join(done.stderr for done in both)
    _expect_joined("native", tmp_path, alone, stdout, stderr)


def _expect_joined(backend: str, folder: Path, alone: Report, stdout: str, stderr: str) -> None:
    report = Report.read(folder / "runs/x")
    assert (report.strategy, report.size, report.steps) == (f"{backend}/nothing", 2, 12)
    assert len(report.peak_rss) == 2
    assert [step for step, _ in report.losses] == [step for step, _ in alone.losses]
    assert [loss for _, loss in report.losses] == pytest.approx([loss for _, loss in alone.losses], rel=1e-6)
    assert len(re.findall("12 steps in ", stderr)) == 1  # one rank draws
    assert len(re.findall("folder +runs/x", stdout)) == 1  # and one prints
    kept = {"config.json", "launch.json", *(f"rank-{r}.{kind}" for r in (0, 1) for kind in ("beat", "jsonl"))}
    assert set(os.listdir(folder / "runs/x")) == kept


def test_a_world_of_another_size(tmp_path: Path, forks: Forks) -> None:
    """Both numbers and the way out."""
    (tmp_path / "x.yaml").write_text(CONFIG, encoding="utf-8")
    both = forks.ranks(["-m", "unipar", "run", "x.yaml", "--set", "parallel.data=4"], tmp_path)
    assert all(done.returncode for done in both)
    refusal = "parallel.data: 4, but torchrun started 2 processes; start 4 processes, or set parallel.data: auto"
    assert f"unipar: {refusal}" in "".join(done.stderr for done in both)
    assert not (tmp_path / "runs").exists()


TWICE = """
import os
import unipar
from tests.support.tiny import CONFIG, Tiny
for name in ("a", "b"):
    report = unipar.launch(CONFIG, task=Tiny, overrides={"out": name, "backend": BACKEND}, quiet=True)
    with open(f"{name}-{os.environ['RANK']}", "w") as file:
        file.write(f"{report.steps} steps, {len(report.peak_rss)} ranks")
"""


@pytest.mark.parametrize("backend", ["native", "deepspeed", "horovod", "accelerate"])
def test_two_launches_in_one_foreign_world(backend: str, tmp_path: Path, forks: Forks) -> None:
    """Both get their report on every rank."""
    (tmp_path / "script.py").write_text(TWICE.replace("BACKEND", repr(backend)), encoding="utf-8")
    for done in forks.ranks(["script.py"], tmp_path):
        assert done.returncode == 0, done.stderr
    _expect_two(tmp_path)


NO_OUT = """
import os
import unipar
from tests.support.tiny import CONFIG, Tiny
for _ in range(2):
    report = unipar.launch(CONFIG, task=Tiny)
    print(report.out, report.steps, len(report.peak_rss))
"""


def test_a_folder_for_each_run(tmp_path: Path, forks: Forks) -> None:
    """Without `out`: all ranks of a world that another launcher made agree on the names."""
    (tmp_path / "script.py").write_text(NO_OUT, encoding="utf-8")
    (tmp_path / "runs/run").mkdir(parents=True)
    (tmp_path / "runs/run/config.json").touch()
    both = forks.ranks(["script.py"], tmp_path)
    assert [done.returncode for done in both] == [0, 0], [done.stderr for done in both]
    for done in both:
        assert [line for line in done.stdout.splitlines() if line.startswith("runs/")] == [
            *("runs/run-2 12 2", "runs/run-3 12 2")
        ]
    assert both[0].stderr.startswith("run folder: runs/run-2\n")
    assert "run folder" not in both[1].stderr
    assert sorted(os.listdir(tmp_path / "runs")) == ["run", "run-2", "run-3"]


@pytest.mark.sweep
@pytest.mark.parametrize("launcher", [name for name in LAUNCH_COMMANDS if name not in ("python", "srun")])
def test_two_worlds_at_once(launcher: str, tmp_path: Path, alone: Report) -> None:
    """Without `out`: two launches at the same time train in two folders, each with all of its ranks."""
    (tmp_path / "x.yaml").write_text(CONFIG, encoding="utf-8")
    with ThreadPoolExecutor(2) as pool:
        for done in pool.map(run, [command(launcher, "x.yaml") for _ in range(2)], [tmp_path] * 2):
            assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(os.listdir(tmp_path / "runs")) == ["x", "x-2"]
    kept = {"config.json", "launch.json", *(f"rank-{r}.{kind}" for r in (0, 1) for kind in ("beat", "jsonl"))}
    for name in ("x", "x-2"):
        report = Report.read(tmp_path / "runs" / name)
        assert (report.size, report.steps, len(report.peak_rss)) == (2, 12, 2)
        assert [loss for _, loss in report.losses] == pytest.approx([loss for _, loss in alone.losses], rel=1e-6)
        assert set(os.listdir(tmp_path / "runs" / name)) == kept


@pytest.mark.sweep
@pytest.mark.parametrize("backend", ["native", "deepspeed", "horovod", "accelerate"])
def test_two_launches_under_torchrun(backend: str, tmp_path: Path) -> None:
    """The same, started by the real launcher."""
    (tmp_path / "script.py").write_text(TWICE.replace("BACKEND", repr(backend)), encoding="utf-8")
    done = run(in_private_network([*LAUNCH_COMMANDS["torchrun"][:-1], "script.py"]), tmp_path)
    assert done.returncode == 0, done.stderr
    _expect_two(tmp_path)


def _expect_two(tmp_path: Path) -> None:
    for name in ("a-0", "a-1", "b-0", "b-1"):
        assert (tmp_path / name).read_text("utf-8") == "12 steps, 2 ranks"


@pytest.mark.sweep
@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed", "mpirun"])
def test_ranks_die_with_a_launcher_that_is_killed(launcher: str, tmp_path: Path) -> None:
    """kill -9 leaves orphans otherwise; `deepspeed` has a process of its own between it and the ranks."""
    (tmp_path / "x.yaml").write_text(CONFIG.replace("steps: 12", "steps: 1000000"), encoding="utf-8")
    process = subprocess.Popen(
        command(launcher, "x.yaml"),
        cwd=tmp_path,
        env=environment(tmp_path),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    run_logs = [tmp_path / f"runs/x/rank-{rank}.jsonl" for rank in (0, 1)]
    eventually(lambda: all(x.exists() and '"step"' in x.read_text("utf-8") for x in run_logs), "no step", 60)
    left = [next(RunLog.read(x))["pid"] for x in run_logs]
    left += {int(process_stat(rank)[PARENT]) for rank in left} - {process.pid}
    assert len(left) == (3 if launcher == "deepspeed" else 2)
    process.send_signal(signal.SIGKILL)
    process.wait()
    try:
        eventually(lambda: not any(is_running(pid) for pid in left[:2]), "orphans")
        eventually(lambda: not any(is_running(pid) for pid in left), f"{left[2:]} lives on without ranks")
    finally:
        for pid in filter(is_running, left):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.sweep
def test_ranks_behind_a_shell_of_their_own(tmp_path: Path, alone: Report) -> None:
    """They have no parent in common, and find one another all the same."""
    (tmp_path / "x.yaml").write_text(CONFIG, encoding="utf-8")
    if why := reason_missing("mpirun"):
        pytest.skip(why)
    script = f'{sys.executable} -m unipar run x.yaml "$@"; exit $?'
    done = run(in_private_network([*LAUNCH_COMMANDS["mpirun"][:-2], "sh", "-c", script]), tmp_path)
    assert done.returncode == 0, done.stderr
    assert Report.read(tmp_path / "runs/x").losses == alone.losses
