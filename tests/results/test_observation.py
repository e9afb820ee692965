"""Results of an observed command, as text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from unipar.errors import ReportError
from unipar.results.observation import (
    OBSERVED_JSON,
    Finding,
    Observation,
    ObservedCommand,
    describe_script,
    format_ranks_table,
)
from unipar.results.observed_rank import ObservedRank, observed_rank_path, read_observed_ranks

FAULT = Finding(
    kind="unequal copies",
    severity="fault",
    ranks=(1,),
    step=8,
    parameter="0.weight",
    says="after step 8 1 of 6 weights differ between the ranks: 0.weight on rank 1",
    way_out="change no weight on one rank alone",
)


def rank(number: int, **changes: Any) -> ObservedRank:
    fields: dict[str, Any] = {
        "rank": number,
        "size": 2,
        "libraries": ("Accelerate",),
        "models": ("DDP > GPT (model)",),
        "optimizers": ("AdamW", "AdamW"),
        "parameters": 1234567,
        "steps": 12,
        "seconds": 0.25,
        "phases": {"data": 0.01, "forward": 0.08, "backward": 0.15, "update": 0.01},
        "waiting": 0.125,
        "backwards": (2, 2),
        "losses": (2.5, 2.0 + number),
        "norms": {1: 3.0, 2: 1.5},
        "rates": {1: (1e-3,), 2: (2e-3, 1e-3)},
    }
    return ObservedRank(**fields | changes)


def write(folder: Path, command: ObservedCommand, *ranks: ObservedRank) -> None:
    (folder / OBSERVED_JSON).write_text(command.model_dump_json(), "utf-8")
    for each in ranks:
        observed_rank_path(folder, each.rank).write_text(each.model_dump_json(), "utf-8")
    start = {"event": "start", "time": 0.0, "strategy": "observed: DDP", "size": 2, "parameters": 1234567}
    (folder / "rank-0.jsonl").write_text(json.dumps(start) + "\n", "utf-8")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "step 8: after step 8 1 of 6 weights differ between the ranks: 0.weight on rank 1. "
             "Way out: change no weight on one rank alone."),
        ({"step": None, "way_out": ""}, "after step 8 1 of 6 weights differ between the ranks: 0.weight on rank 1."),
    ],
)  # fmt: skip
def test_a_finding_as_text(changes: dict[str, Any], text: str) -> None:
    """A finding is a sentence, with its step and the way out if there are any."""
    assert str(FAULT.model_copy(update=changes)) == text


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {},
            "2 ranks; DDP > GPT (model); 1,234,567 parameters; AdamW; called by Accelerate; 12 steps, 2 backwards each",
        ),
        (
            {"libraries": ("Lightning", "DeepSpeed"), "backwards": (1, 1), "skipped": 3},
            "2 ranks; DDP > GPT (model); 1,234,567 parameters; AdamW; called by DeepSpeed in Lightning; 12 steps, 3 "
            "skipped by loss scaling",
        ),
        (
            {"size": 1, "libraries": (), "models": (), "backwards": (), "steps": 1},
            "1 rank; no model that is still alive; 1,234,567 parameters; AdamW; called by the script's own loop; "
            "1 step",
        ),
    ],
)
def test_a_script_in_a_line(changes: dict[str, Any], text: str) -> None:
    """What the script trains, with what, on how many ranks, and who calls the optimizer."""
    assert describe_script([rank(0, **changes)]) == text


def test_ranks_as_a_table() -> None:
    """A row for each rank: medians of times, and the last norm, rate and loss; unknown columns are left out."""
    assert format_ranks_table([rank(0), rank(1, waiting=None)], 120) == [
        "rank  a step   data  forward  backward  update  waits  norm   rate    loss",
        "   0  250 ms  10 ms    80 ms    150 ms   10 ms    12%   1.5  0.002  2.0000",
        "   1  250 ms  10 ms    80 ms    150 ms   10 ms      -   1.5  0.002  3.0000",
    ]
    bare = rank(0, phases={}, waiting=None, norms={}, losses=(), rates={}, seconds=None)
    assert format_ranks_table([bare], 120) == ["rank  a step  rate", "   0       -     -"]


def test_an_observation_as_text(tmp_path: Path) -> None:
    """Script, ranks, findings, what was compared, and each rank's notes once."""
    command = ObservedCommand(
        command=("python", "train.py"),
        exit_code=0,
        findings=(FAULT, Finding(kind="coarse dtype", severity="note", says="rank 0: coarse")),
        checked=("initial weights", "batches"),
        notes=("said once",),
    )
    write(tmp_path, command, rank(0, notes=("no account",)), rank(1, notes=("no account",)))
    observed = Observation.read(tmp_path)
    lines = str(observed).splitlines()
    assert lines[0].startswith("2 ranks; DDP > GPT (model); 1,234,567")
    assert lines[-5:] == [
        f"fault: {FAULT}",
        "note: rank 0: coarse.",
        "compared without a finding: initial weights, batches",
        "note: said once",
        "note: no account",
    ]
    assert observed.command == command
    assert [each.rank for each in read_observed_ranks(tmp_path)] == [0, 1]


def test_a_folder_without_an_observation(tmp_path: Path) -> None:
    """A folder of something else is refused by its name."""
    with pytest.raises(ReportError, match=r"observed\.json cannot be read as the result of `unipar observe`"):
        Observation.read(tmp_path)


def test_a_damaged_rank(tmp_path: Path) -> None:
    """A file that was cut off is named, with what to do."""
    write(tmp_path, ObservedCommand(command=(), exit_code=0), rank(0))
    observed_rank_path(tmp_path, 0).write_text("{", "utf-8")
    with pytest.raises(ReportError, match=r"(?s)rank-0\.observed\.json cannot be read .*: observe the command again"):
        Observation.read(tmp_path)
