"""`unipar verify`: planted faults are found and named, and a correct engine is given no fault."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.forks import Forks
from unipar.config import Config, Strategy
from unipar.config.settled import SettledConfig
from unipar.verification.worker.jobs import Job, RunKey

ROOT = Path(__file__).parents[2]

CONFIG = """
task: {use: "tests.conformance.tasks:Plain"}
device: cpu
parallel: {data: 2}
batch: {total: 16, micro: 4}
train:
  steps: 20
  optimizer: {name: adamw, lr: 1.0e-2, weight_decay: 0.1, decay: matrices}
  schedule: {name: cosine, warmup: 4}
  clip: 0.3
"""

NAMED = {
    "no-averaging": "not averaged",
    "averaging-twice": "averaged twice",
    "clip-per-rank": "a norm taken per rank",
    "clip-per-rank-unsaid": "a norm taken per rank",
    "clip-own-part": "a norm taken per rank",
    "divided-twice": "divided twice by accumulation",
    "schedule-per-process": "a rate that runs ahead",
    "same-samples": "samples seen twice",
    "group-left-out": "a group left out",
    "last-microbatch-dropped": "a microbatch left out",
    "stale-gradient": "a stale gradient",
    "bf16-reduction": "rounded to bf16",
    "not-reduced": "not reduced",
    "last-gradient-lost": "a microbatch left out",
    "wrong-module": "another forward",
}
"""Kind of fault that verify must name, by planted fault."""

LATER = (
    "clip-per-rank-unsaid",
    "clip-own-part",
    "schedule-per-process",
    "last-microbatch-dropped",
    "not-reduced",
    "bf16-reduction",
)
"""Faults that are planted in the sweeps only: others of their kinds are always."""

FIRST = {"stale-gradient": 2}
"""First step that a planted fault changes, if it is not step 1."""


def proved(
    forks: Forks, folder: Path, config: str, *words: str
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """Run verify with the faulty backend installed; return the process and verify.json."""
    file = folder / "config.yaml"
    file.write_text(config, "utf-8")
    path = os.pathsep.join([str(ROOT / "tests" / "support" / "faulty"), str(ROOT)])
    command = ["verify", str(file), "--out", str(folder / "out"), *words]
    out = forks.unipar(command, {"PYTHONPATH": path, "COLUMNS": "80"})
    said = folder / "out" / "verify" / "verify.json"
    return out, json.loads(said.read_text("utf-8")) if said.exists() else {}


@pytest.fixture(scope="module")
def planted(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, forks: Forks
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """Verify all faults at once that are not left to the sweeps, or all that the collected tests ask for; and none."""
    asked = {item.name for item in request.session.items}
    faults = [f for f in NAMED if f not in LATER or f"test_a_planted_fault_is_found_and_named[{f}]" in asked]
    strategies = ["faulty/nothing", "faulty/nothing+dies", *(f"faulty/nothing+{fault}" for fault in faults)]
    words = [word for strategy in strategies for word in ("--strategies", strategy)]
    return proved(forks, tmp_path_factory.mktemp("planted"), CONFIG, "--steps", "6", *words)


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (RunKey("probe"), "task probe"),
        (RunKey("one process"), "one process"),
        (RunKey("one process", precision="fp64"), "one process, fp64"),
        (RunKey("one process", micro=2), "one process, microbatches of 2"),
        (RunKey("shares", bitwise=True), "a replay, share by share"),
        (RunKey("micros", bitwise=True), "a replay, microbatch by microbatch"),
        (RunKey("shares"), "a replay, share by share, as configured"),
        (RunKey("micros"), "a replay, microbatch by microbatch, as configured"),
        (RunKey("shares", precision="fp64"), "a replay, share by share, fp64"),
        (RunKey("shares", precision="fp32"), "a replay, share by share, fp32"),
        (
            RunKey("shares", perturbed=True),
            "a replay, share by share, as configured, weights changed in the last place",
        ),
        (RunKey("shares", step=3), "a replay up to step 3"),
        (RunKey("shares", step=3, precision="fp64"), "a replay up to step 3, fp64"),
        (RunKey("strategy", "native/nothing"), "native/nothing"),
        (RunKey("strategy", "native/nothing", bitwise=True), "native/nothing, bitwise"),
    ],
)
def test_a_run_is_known_by_its_key(key: RunKey, text: str) -> None:
    """The text of a key names its run; a job survives the way through the file of its world."""
    config = Config.model_validate({"batch": {"total": 4}, "train": {"steps": 1}})
    job = Job(key=key, kind="run", settled=SettledConfig.of(config, Strategy("native"), 2, "cpu"), steps=2)
    told = json.loads(json.dumps(job.to_json()))
    assert (str(key), told["name"]) == (text, text)
    assert Job.from_json(told) == job


def row_of(said: dict[str, Any], strategy: str) -> dict[str, Any]:
    return next(row for row in said["strategies"] if row["strategy"] == strategy)


@pytest.mark.parametrize("fault", [pytest.param(f, marks=[pytest.mark.sweep] * (f in LATER)) for f in NAMED])
def test_a_planted_fault_is_found_and_named(planted: tuple[Any, dict[str, Any]], fault: str) -> None:
    """Each planted fault is named by its kind and its first bad step."""
    row = row_of(planted[1], f"faulty/nothing+{fault}")
    assert row["outcome"] == "disagrees", row
    assert (row["finding"]["kind"], row["finding"]["step"]) == (NAMED[fault], FIRST.get(fault, 1)), row["finding"]


def test_the_same_engine_without_a_fault_agrees(planted: tuple[Any, dict[str, Any]]) -> None:
    """The correct engine is bit-for-bit equal to the replay; the command fails because of the others."""
    row = row_of(planted[1], "faulty/nothing")
    assert (row["outcome"], row["bits"], row["finding"]) == ("agrees", "shares", None)
    assert planted[0].returncode == 1
    assert planted[0].stderr.count("faulty/nothing agrees") == 1


def test_a_strategy_that_dies_is_a_row(planted: tuple[Any, dict[str, Any]]) -> None:
    """The other strategies go on, and the log named in the row exists."""
    row = row_of(planted[1], "faulty/nothing+dies")
    assert row["outcome"] == "failed"
    assert row["note"].startswith("rank 1 ended with exit code 3, without an error of its own")
    assert Path(row["note"].rpartition("its log: ")[2]).is_file()


def test_where_a_fault_is(planted: tuple[Any, dict[str, Any]]) -> None:
    """The finding names the first module, forward and backward, and the first parameter."""
    forward = row_of(planted[1], "faulty/nothing+wrong-module")["finding"]
    assert forward["forward"] == "blocks.1.up (rank 1, microbatch 1)"
    lost = row_of(planted[1], "faulty/nothing+last-gradient-lost")["finding"]
    assert (lost["forward"], lost["backward"]) == ("", "head (rank 0, microbatch 2)")
    group = row_of(planted[1], "faulty/nothing+group-left-out")["finding"]
    assert (group["forward"], group["backward"], group["parameter"]) == ("", "", "blocks.0.norm.weight")
    assert group["parameters"] == 8
    assert group["says"] == "step 1 does not move the 8 parameters of group 2 of 2 (blocks.0.norm.weight first)"


def test_two_factors_are_told_apart(planted: tuple[Any, dict[str, Any]]) -> None:
    """With two ranks and two microbatches, a run with one microbatch tells the two factors apart."""
    ranks = row_of(planted[1], "faulty/nothing+averaging-twice")["finding"]["says"]
    assert ranks.endswith("0.5 times that of one process; with 1 microbatch instead of 2 it stays the same (0.5)")
    micros = row_of(planted[1], "faulty/nothing+divided-twice")["finding"]["says"]
    assert micros.endswith("0.5 times that of one process; with 1 microbatch instead of 2 it changes with them (1)")
    strategies = ("faulty/nothing+averaging-twice", "faulty/nothing+divided-twice")
    assert [row_of(planted[1], strategy)["finding"]["candidates"] for strategy in strategies] == [[], []]


RMSPROP = "optimizer: {name: rmsprop, lr: 1.0e-3, weight_decay: 0.1"
NAMED_BY_NORM = {"no-averaging": "not averaged", "clip-per-rank": "a norm taken per rank"}
NAMED_BY_STATE = {"stale-gradient": "a stale gradient", "bf16-reduction": "rounded to bf16"}


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("more", "told"), [("}", dict.fromkeys(NAMED_BY_STATE, "")), (", centered: true}", NAMED_BY_STATE)]
)
def test_rmsprop(more: str, told: dict[str, str], tmp_path: Path, forks: Forks) -> None:
    """Its state tells gradients where it is centered; otherwise kinds come from norms, and others have no name."""
    config = CONFIG.replace(next(line for line in CONFIG.splitlines() if "optimizer" in line).strip(), RMSPROP + more)
    faults = NAMED_BY_NORM | told
    words = [word for fault in faults for word in ("--strategies", f"faulty/nothing+{fault}")]
    _, said = proved(forks, tmp_path, config, "--steps", "5", "--strategies", "faulty/nothing", *words)
    kinds = {fault: row_of(said, f"faulty/nothing+{fault}")["finding"]["kind"] for fault in faults}
    assert kinds == faults
    assert row_of(said, "faulty/nothing")["bits"] == "shares"
