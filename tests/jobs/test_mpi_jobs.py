"""Open MPI: the command as words; and jobs that really run, on this machine."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.launchers import environment
from tests.support.programs import needs_programs
from tests.support.submissions import TEXT, submission, write_config
from unipar.errors import Unsupported
from unipar.results.run_report import Report

PYTHON = sys.executable
ROOT_TOO = "{hosts: [localhost], extra_args: [--allow-run-as-root, --oversubscribe, --mca oob_tcp_if_include lo]}"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_its_command(here: Path) -> None:
    """Hosts with their ranks, the address of the first, secrets by name, what else is asked for."""
    mpi = "hosts: [127.0.0.1, desk2], address: 10.0.0.7, port: 5000, secrets: [HOME], extra_args: [--mca if eth0]"
    file = write_config(here, f"machines: {{nodes: 2, ranks_per_node: 4, time: 90s, mpi: {{{mpi}}}}}\n")
    made = submission(file, "mpi", arguments=["--backend", "horovod"])
    assert made.texts == {}
    assert made.command == [
        *("mpirun", "-np", "8", "-H", "127.0.0.1:4,desk2:4"),
        *("-x", "MASTER_ADDR=10.0.0.7", "-x", "MASTER_PORT=5000", "-x", "HOME", "--wdir", str(here)),
        *("--bind-to", "none", "--timeout", "90", "--mca", "if", "eth0"),
        *(PYTHON, "-m", "unipar", "run", str(file), "--backend", "horovod", "--out", f"{here}/runs/x"),
    ]


@pytest.mark.parametrize(
    ("sets", "sentence"),
    [
        (
            ["machines.ranks_per_node=1"],
            "machines.mpi.hosts: names no machine, and machines.nodes is 1: name so many, or change machines.nodes",
        ),
        (
            ["machines.nodes=2", "machines.ranks_per_node=1", "machines.mpi.hosts=[10.0.0.1]"],
            "machines.mpi.hosts: names 1 machine (10.0.0.1), and machines.nodes is 2: name so many, or change "
            "machines.nodes",
        ),
        (
            ["machines.nodes=2", "machines.ranks_per_node=1", "machines.mpi.hosts=[10.0.0.1, 10.0.0.1]"],
            "machines.mpi.hosts: 10.0.0.1, 10.0.0.1: a machine is named twice; name each once, with "
            "machines.ranks_per_node ranks",
        ),
        (
            ["machines.ranks_per_node=1", "machines.mpi.hosts=[desk.invalid]"],
            "machines.mpi.hosts: desk.invalid does not resolve here; name the first machine by an address that the "
            "others reach, or give one in machines.mpi.address",
        ),
        (
            ["machines.nodes=2", "machines.ranks_per_node=1", "machines.mpi.hosts=[localhost, 10.0.0.1]"],
            "machines.mpi.hosts: localhost means loopback here, where the other machines do not reach it; give an "
            "address that they reach in machines.mpi.address",
        ),
        (
            ["machines.ranks_per_node=1", "machines.mpi.hosts=[localhost]", "launch.restarts=1", "resume=never"],
            "launch.restarts: mpirun starts nothing again; set it to 0, and go on by hand with --resume",
        ),
    ],
)
def test_what_is_refused(here: Path, sets: list[str], sentence: str) -> None:
    """Before mpirun is called."""
    with pytest.raises(Unsupported) as e:
        submission(write_config(here), "mpi", sets)
    assert str(e.value) == f"machines.on: mpi: {sentence}"


class Desk:
    """A folder with a config that trains on this machine through mpirun."""

    def __init__(self, folder: Path, more: str = "") -> None:
        self.folder = folder
        text = TEXT.replace(":Tiny}", ":Tiny, args: {pause: 0.02}}")
        machines = f"machines: {{on: mpi, ranks_per_node: 2, setup: ['export SAID=yes'], mpi: {ROOT_TOO}}}\n"
        (folder / "x.yaml").write_text(text + machines + more, encoding="utf-8")

    def unipar(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [PYTHON, "-m", "unipar", *words],
            cwd=self.folder,
            env=environment(self.folder),
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )

    def jobs(self) -> list[str]:
        return self.unipar("jobs").stdout.splitlines()[1].split(maxsplit=7)

    def wait(self, true: Callable[[], Any]) -> None:
        until = time.monotonic() + 60
        while not true():
            assert time.monotonic() < until, self.unipar("jobs").stdout
            time.sleep(0.2)


needs_mpirun = needs_programs("mpirun")


@needs_mpirun
@pytest.mark.slow
def test_in_the_foreground(here: Path) -> None:
    """mpirun's output is the command's, and so is its exit code; the job is listed when it has ended."""
    desk = Desk(here)
    done = desk.unipar("submit", "x.yaml")
    assert done.returncode == 0, done.stderr + done.stdout
    assert "strategy    native/nothing, 2 ranks" in done.stdout
    assert Report.read(here / "runs/x").size == 2
    assert desk.jobs()[2:7] == ["run", "1", "x", "2", "ended"]
    number = desk.jobs()[1]
    said = desk.unipar("jobs", "logs", number)
    assert (said.returncode, said.stderr) == (
        1,
        f"unipar: job {number} printed to its terminal; with --detach it prints to a file\n",
    )
    failed = desk.unipar("submit", "x.yaml", "--set", "task.args.fails_on=1")
    assert failed.returncode == 1
    assert "this rank was told to fail" in failed.stderr


@needs_mpirun
@pytest.mark.slow
def test_ctrl_c(here: Path) -> None:
    """The signal reaches mpirun and the command that waits for it; both ranks stop, and nothing is left running."""
    desk = Desk(here, "checkpoint: {every: 10}\n")
    with subprocess.Popen(
        [PYTHON, "-m", "unipar", "submit", "x.yaml", "--set", "train.steps=5000"],
        cwd=here,
        env=environment(here),
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as command:
        desk.wait(lambda: (here / "runs/x/checkpoints/step-00000010").exists())
        os.killpg(command.pid, signal.SIGINT)
        printed, _ = command.communicate(timeout=60)
    assert command.returncode == 130
    assert "Traceback" not in printed
    (step,) = set(re.findall(r"unipar: stopped by a signal after step (\d+)", printed))
    assert (here / f"runs/x/checkpoints/step-{int(step):08}").exists()
    assert desk.jobs()[6] == "stopped"
    left = subprocess.run(["ps", "-o", "stat=", "-s", str(command.pid)], capture_output=True, text=True, check=False)
    assert [state for state in left.stdout.split() if not state.startswith("Z")] == []


@needs_mpirun
@pytest.mark.slow
def test_detached(here: Path) -> None:
    """The job goes on when the command has ended; cancel stops both ranks at a step boundary, with a checkpoint."""
    desk = Desk(here, "checkpoint: {every: 10}\n")
    done = desk.unipar("submit", "x.yaml", "--detach", "--set", "train.steps=5000")
    assert done.returncode == 0, done.stderr
    (number,) = re.findall(r"^mpi job (\d+): 1 machine x 2 ranks, ", done.stdout, re.MULTILINE)
    desk.wait(lambda: (here / "runs/x/checkpoints/step-00000010").exists())
    assert desk.jobs()[:7] == ["mpi", number, "run", "1", "x", "2", "running"]
    assert desk.unipar("jobs", "cancel", number).stdout == f"mpi job {number}: asked to end\n"
    desk.wait(lambda: desk.jobs()[6] != "running")
    printed = desk.unipar("jobs", "logs", number).stdout
    (step,) = set(re.findall(r"unipar: stopped by a signal after step (\d+)", printed))
    assert (here / f"runs/x/checkpoints/step-{int(step):08}").exists()
    assert desk.jobs()[6] == "stopped"
