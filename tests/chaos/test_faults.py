"""Signals, a rank that stops, a network that is cut, losses that are no numbers, configs that are nonsense."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.config_fuzz import TRIALS, load_nonsense
from tests.support.disturbed_runs import FAULTS
from tests.support.training_kills import STRATEGIES
from unipar.utils.table import format_table

pytestmark = pytest.mark.chaos

TRIALS_OF_A_STRATEGY = {"SIGTERM or SIGUSR1": 5, "a second SIGTERM": 3}
"""Runs of each strategy, where it is more than one."""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_has_its_promised_outcome(fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In each strategy: exit code, words, time, and what is published are as docs/checkpoints.md promises."""
    rows: list[tuple[str, ...]] = []
    wrong: list[Any] = []
    for strategy in STRATEGIES:
        trials = TRIALS_OF_A_STRATEGY.get(fault, 1)
        played = [_disturbed(tmp_path / f"{len(rows)}-{seed}", strategy, fault, seed) for seed in range(trials)]
        codes = sorted({str(one["code"]) for one in played})
        rows.append((strategy, str(trials), ", ".join(codes), f"{max(one['seconds'] for one in played):.1f}"))
        wrong += [one for one in played if one["faults"]]
    with capsys.disabled():
        header = (f"{fault}, seeds from 0", "trials", "exit codes", "longest, s")
        print("\n" + format_table(header, rows, right=(1, 2, 3)))
        print(f"faults: {len(wrong)}")
    assert wrong == []


def _disturbed(folder: Path, strategy: str, fault: str, seed: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.support.disturbed_runs", str(folder), strategy, fault, str(seed)]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)


def test_two_runs_at_once(tmp_path: Path) -> None:
    """Of one config, in one folder: each has a folder of its own, and both train to the end."""
    config = {
        "task": {"use": f"{Path(__file__).parents[1]}/support/tiny.py:Tiny"},
        "device": "cpu",
        "parallel": {"data": 2},
        "batch": {"total": 8},
        "train": {"steps": 20},
        "checkpoint": {"every": 5},
    }
    (tmp_path / "twice.json").write_text(json.dumps(config), "utf-8")
    command = [sys.executable, "-m", "unipar", "run", "twice.json"]
    both = [subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(2)]
    said = [one.communicate()[1].decode() for one in both]
    assert [one.returncode for one in both] == [0, 0], said
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["twice", "twice-2"]


def test_ten_thousand_configs_of_nonsense(capsys: pytest.CaptureFixture[str]) -> None:
    """Each is read, or refused by an error of unipar's that names a key or a line; none imports or runs anything."""
    outcomes = load_nonsense(TRIALS, seed=15)
    with capsys.disabled():
        print("\n" + format_table(("config, seed 15", "trials"), [(k, str(v)) for k, v in sorted(outcomes.items())]))
    assert sum(outcomes.values()) == TRIALS
    assert set(outcomes) <= {"read", "refused with a key", "refused with a line"}
    assert outcomes["read"] > TRIALS / 20
    assert outcomes["refused with a line"] > TRIALS / 20
