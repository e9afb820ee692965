"""Worlds that other launchers start: the same script, the same numbers, one report on every rank."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.world import FOUND, ROOT, eventually, runs
from unipar.report import Report

BIN = Path(sys.executable).parent
CONFIG = f"""
task: {{use: {ROOT}/tests/tiny.py:Tiny}}
device: cpu
batch: {{total: 8}}
train: {{steps: 12, optimizer: {{name: sgd, lr: 0.01}}}}
log: {{every: 5}}
"""

COMMANDS = {
    "torchrun": ["torchrun", "--standalone", "--nproc-per-node", "2", "-m"],
    "accelerate launch": [
        "accelerate",
        "launch",
        "--multi_gpu",
        "--num_processes",
        "2",
        "--main_process_port",
        "{port}",
        "-m",
    ],
    "deepspeed": ["deepspeed", "--num_gpus", "2", "--master_port", "{port}", "--module"],
    "horovodrun": ["horovodrun", "--gloo", "-np", "2", sys.executable, "-m"],
}
CELLS = [
    ("torchrun", "native"),
    ("torchrun", "deepspeed"),
    ("torchrun", "horovod"),
    ("torchrun", "accelerate"),
    ("accelerate launch", "accelerate"),
    ("deepspeed", "deepspeed"),
    ("horovodrun", "horovod"),
]


def environment(folder: Path) -> dict[str, str]:
    path = os.pathsep.join([str(BIN), os.environ["PATH"]])
    return {**os.environ, **FOUND, "OMP_NUM_THREADS": "1", "PATH": path, "TMPDIR": str(folder)}


def command(launcher: str, *words: str) -> list[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    made = [word.format(port=port) for word in COMMANDS[launcher]]
    return [*made, "unipar", "run", *words]


def run(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    made = environment(folder)
    return subprocess.run(words, cwd=folder, env=made, capture_output=True, text=True, check=False, timeout=120)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """The same run in a world of ours."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "x.yaml").write_text(CONFIG, encoding="utf-8")
    words = [sys.executable, "-m", "unipar", "run", "x.yaml", "--set", "parallel.data=2"]
    subprocess.run(words, cwd=folder, env=environment(folder), check=True, capture_output=True)
    return Report.read(folder / "runs/x")


@pytest.mark.parametrize(("launcher", "backend"), CELLS)
def test_joins(launcher: str, backend: str, tmp_path: Path, alone: Report) -> None:
    """`LAUNCHER -m unipar run`: two ranks, the losses of a world of ours, nothing of ours left but the run."""
    (tmp_path / "x.yaml").write_text(CONFIG, encoding="utf-8")
    words = command(launcher, "x.yaml", "--backend", backend)
    done = subprocess.run(
        words, cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = Report.read(tmp_path / "runs/x")
    assert (report.cell, report.size, report.steps) == (f"{backend}/nothing", 2, 12)
    assert len(report.peak_rss) == 2
    assert [step for step, _ in report.losses] == [step for step, _ in alone.losses]
    assert [loss for _, loss in report.losses] == pytest.approx([loss for _, loss in alone.losses], rel=1e-6)
    assert len(re.findall("12 steps in ", done.stderr)) == 1  # one rank draws
    assert len(re.findall("folder +runs/x", done.stdout)) == 1  # and one prints
    kept = {"config.json", "launch.json", *(f"rank-{r}.{kind}" for r in (0, 1) for kind in ("beat", "jsonl"))}
    assert set(os.listdir(tmp_path / "runs/x")) == kept


def test_a_world_of_another_size(tmp_path: Path) -> None:
    """Both numbers and the way out."""
    (tmp_path / "x.yaml").write_text(CONFIG, encoding="utf-8")
    words = command("torchrun", "x.yaml", "--set", "parallel.data=4")
    done = run(words, tmp_path)
    assert done.returncode != 0
    assert "unipar: parallel.data: 4, but torchrun started 2 processes; give it 4, or say auto" in done.stderr
    assert not (tmp_path / "runs").exists()


TWICE = """
import os
import unipar
from tests.tiny import CONFIG, Tiny
for name in ("a", "b"):
    report = unipar.launch(CONFIG, task=Tiny, overrides={"out": name, "backend": BACKEND}, quiet=True)
    with open(f"{name}-{os.environ['RANK']}", "w") as file:
        file.write(f"{report.steps} steps, {len(report.peak_rss)} ranks")
"""


def _twice(backend: str, folder: Path) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(TWICE.replace("BACKEND", repr(backend)), encoding="utf-8")
    words = ["torchrun", "--standalone", "--nproc-per-node", "2", "script.py"]
    return subprocess.run(
        words, cwd=folder, env=environment(folder), capture_output=True, text=True, check=False, timeout=120
    )


@pytest.mark.parametrize("backend", ["native", "deepspeed", "horovod", "accelerate"])
def test_two_launches_in_one_foreign_world(backend: str, tmp_path: Path) -> None:
    """Both get their report on every rank."""
    done = _twice(backend, tmp_path)
    assert done.returncode == 0, done.stderr
    for name in ("a-0", "a-1", "b-0", "b-1"):
        assert (tmp_path / name).read_text("utf-8") == "12 steps, 2 ranks"


def test_ranks_die_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    """kill -9 of torchrun leaves orphans otherwise."""
    (tmp_path / "x.yaml").write_text(CONFIG.replace("steps: 12", "steps: 1000000"), encoding="utf-8")
    process = subprocess.Popen(
        command("torchrun", "x.yaml"),
        cwd=tmp_path,
        env=environment(tmp_path),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    ledger = tmp_path / "runs/x/rank-0.jsonl"
    eventually(lambda: ledger.exists() and '"step"' in ledger.read_text("utf-8"), "no step", 60)
    ranks = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text("ascii").split()]
    assert len(ranks) == 2
    process.send_signal(signal.SIGKILL)
    process.wait()
    began = time.monotonic()
    eventually(lambda: not any(runs(pid) for pid in ranks), "orphans")
    assert time.monotonic() - began < 2
