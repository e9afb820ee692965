"""`log.memory`: what ranks allocate in the steps that log of an ordinary run, and what it costs where it is off."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unipar
from tests.support.forks import Forks
from tests.support.world import ROOT, short_folder
from unipar.memory.account import read_account
from unipar.memory.sources.events import EventArray
from unipar.memory.sources.malloc_meter import NOTE_DTYPE, find_live_blocks
from unipar.results.run_report import Report
from unipar.run_folder.layout import run_log_path
from unipar.run_folder.run_log import RunLog
from unipar.training.trained_parts import flatten_logged_step
from unipar.utils.procfs import anonymous_memory, peak_resident_bytes, reset_resident_peak

MATRIX = 512 * 512 * 4
TASK = '''
import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

import unipar

KEPT = []


class Squares(unipar.Task):
    """Two matrices; in its first step the loss keeps ten megabytes for good."""

    def __init__(self, apart=False):
        self.apart = apart

    def model(self):
        return nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(2)))

    def data(self):
        return TensorDataset(torch.randn(64, 512, generator=torch.Generator().manual_seed(1)))

    def loss(self, model, batch):
        if self.apart:
            assert not {"unipar.memory.recording.memory_log", "unipar.memory.recording.watcher"} & set(sys.modules)
        elif not KEPT:
            KEPT.append(torch.ones(2_500_000))
        return model(batch[0]).square().mean()
'''


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Generator[None]:
    with short_folder(monkeypatch):
        yield


def told(folder: Path, **more: Any) -> dict[str, Any]:
    (folder / "squares.py").write_text(TASK, encoding="utf-8")
    return {
        "task": {"use": f"{folder}/squares.py:Squares"},
        "device": "cpu",
        "parallel": {"data": 2},
        "batch": {"total": 8},
        "train": {"steps": 6},
        "log": {"every": 2, "memory": True},
        "out": str(folder / "out"),
        **more,
    }


def logged(run: Path, rank: int) -> dict[int, dict[str, dict[str, Any]]]:
    """By step, then by phase."""
    rows = [row for row in RunLog.read(run_log_path(run, rank)) if row["event"] == "step"]
    return {row["step"]: {phase["name"]: phase for phase in row.get("memory", [])} for row in rows}


def test_each_rank_says_what_it_allocates(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """In the steps that log: every byte by what it is for, the planted ones as nobody's, steps later too.

    A run without it loads nothing of it, and has the same losses, bit for bit; its run log says nothing of memory.
    """
    report = unipar.launch(told(tmp_path))
    for rank in (0, 1):
        steps = logged(tmp_path / "out", rank)
        assert list(steps) == [1, 3, 5, 6]
        assert list(steps[1]) == ["built", "forward", "backward", "update", "steady"]
        for step in (3, 5, 6):
            assert list(steps[step]) == ["forward", "backward", "update", "steady"]
            for phase in steps[step].values():
                assert sum(phase["held"].values()) == phase["peak"]
                assert phase["held"]["parameters"] == 2 * MATRIX
                assert 4 * MATRIX <= phase["held"]["optimizer"] < 4 * MATRIX + 1024
                assert 10_000_000 <= phase["held"]["unattributed"] < 1.02 * 10_000_000
        assert 4 * MATRIX <= steps[1]["update"]["held"]["optimizer"] < 4 * MATRIX + 1024
    assert [step for step, _ in report.memory] == [1, 3, 5, 6]
    for rank in (0, 1):
        by = {phase.name: phase.peak for phase in read_account(tmp_path / "out", rank).phases}
        assert by == {name: phase["peak"] for name, phase in logged(tmp_path / "out", rank)[6].items()}
    lines = capfd.readouterr().err.splitlines()
    assert "memory: each block is counted by a preloaded meter" in lines
    (last,) = (line for line in lines if line.startswith("step 6/6  loss "))
    assert " MiB in " in last
    assert re.search(r"unattributed 9\.[5-7] MiB$", last)
    task = {"use": f"{tmp_path}/squares.py:Squares", "args": {"apart": True}}
    off = unipar.launch(told(tmp_path, task=task, log={"every": 2}, out=str(tmp_path / "off")), quiet=True)
    assert off.losses == report.losses
    assert off.memory == []
    assert logged(tmp_path / "off", 0) == {1: {}, 3: {}, 5: {}, 6: {}}


def test_under_a_foreign_launcher_the_system_counts(tmp_path: Path, forks: Forks) -> None:
    """The meter cannot be there from the start, and one sentence says so; what engines name is named."""
    (tmp_path / "x.yaml").write_text(json.dumps(told(tmp_path, parallel={})), encoding="utf-8")
    first, second = forks.ranks(["-m", "unipar", "run", "x.yaml"], tmp_path)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert (
        "memory: resident memory as the system counts it is shown, not each allocation: torchrun started this process "
        "without the meter, which must be preloaded at its start" in first.stderr.splitlines()
    )
    for rank in (0, 1):
        steps = logged(tmp_path / "out", rank)
        for phase in steps[5].values():
            assert sum(phase["held"].values()) == phase["peak"] > 6 * MATRIX
            assert phase["held"]["parameters"] == 2 * MATRIX
    assert Report.read(tmp_path / "out").memory[-1][0] == 6


def test_trackers_get_a_number_a_phase() -> None:
    """By names, as for all else."""
    row = {"loss": 0.5, "memory": [{"name": "update", "peak": 7, "held": {"parameters": 7}}]}
    assert flatten_logged_step(row) == {"loss": 0.5, "memory/update": 7}


# Folding


def notes(*rows: tuple[int, int]) -> EventArray:
    made = np.zeros(len(rows), dtype=NOTE_DTYPE)
    made["address"], made["size"] = zip(*rows, strict=True)
    return made


def test_what_breaks_in_watching_does_not_end_the_run(tmp_path: Path, forks: Forks) -> None:
    """The run trains to its end, says once that memory is no longer recorded, and why."""
    (tmp_path / "x.yaml").write_text(json.dumps(told(tmp_path)), encoding="utf-8")
    path = os.pathsep.join([str(ROOT / "tests/support/faulty"), str(ROOT)])
    words = ["run", str(tmp_path / "x.yaml"), "--backend", "faulty/nothing+nameless"]
    done = forks.unipar(words, {"PYTHONPATH": path}, memory=True)
    assert done.returncode == 0, done.stderr
    said = [row["said"] for row in RunLog.read(run_log_path(tmp_path / "out", 1)) if row["event"] == "memory"]
    assert said == [
        "each block is counted by a preloaded meter",
        "no longer recorded: ArithmeticError: it cannot be said",
    ]
    assert Report.read(tmp_path / "out").steps == 6


def test_what_is_forgotten_was_the_peak_all_the_same() -> None:
    """A rank's peak is that of its whole life, though phases are looked at one by one."""
    block = np.ones(2**26, dtype=np.uint8)
    most = peak_resident_bytes()
    del block
    reset_resident_peak()
    assert anonymous_memory("VmHWM") < most - 2**25
    assert peak_resident_bytes() >= most - 2**20  # the system counts a little late


def test_what_went_is_folded_away() -> None:
    """Of blocks that came again at an address the last counts; what went and never came was older."""
    alive, gone = find_live_blocks(
        notes((1, 100), (2, 200), (1, -100), (9, -50), (1, 300), (2, -200), (3, 400), (9, 10))
    )
    assert alive.tolist() == [4, 6, 7]
    assert gone == 50


def test_nothing_is_folded_to_nothing() -> None:
    """A process that has no notes yet."""
    alive, gone = find_live_blocks(np.zeros(0, dtype=NOTE_DTYPE))
    assert (alive.tolist(), gone) == ([], 0)
