"""Horovod's options: fp16 gradients, process sets and the cycle train; the rest is refused in a sentence."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.conformance import tasks
from tests.conformance.tolerances import Tolerance
from tests.support.running import running
from tests.support.settings import Rows, assert_agrees, run_rows
from unipar.backend import checks, registry
from unipar.config import Config
from unipar.errors import Unsupported

pytestmark = pytest.mark.forked

SETS = {"process_sets": [[0, 1], [2, 3]], "cycle_ms": 0.5}
ROWS: Rows = [
    {"name": "sets", "strategy": "horovod/nothing", "task": "in sets", "options": {"horovod": SETS}},
    {"name": "half", "strategy": "horovod/nothing", "options": {"horovod": {"compression": "fp16"}}},
]
HALF = Tolerance(loss=2e-3, norm=2e-2, params=None)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    return run_rows(ROWS, tmp_path_factory.mktemp("horovod"), 4)


def test_process_sets_are_there_for_the_loss(played: dict[str, list[dict[str, Any]]]) -> None:
    """Each half of four ranks adds its own numbers; gradients are those of all four."""
    assert_agrees(ROWS[0], played["sets"])


def test_half_gradients(played: dict[str, list[dict[str, Any]]]) -> None:
    """fp16 on the way: near, and no longer as near as whole ones."""
    assert_agrees(ROWS[1], played["half"], HALF)
    with pytest.raises(AssertionError):
        assert_agrees(ROWS[1], played["half"])


@pytest.mark.parametrize(
    ("options", "precision", "parameters", "told"),
    [
        ({}, "fp32", 100, 2**20),
        ({}, "fp32", 3 * 2**20 // 4, 4 * 2**20),
        ({}, "fp64", 3 * 2**20 // 4, 7 * 2**20),
        ({}, "fp32", 10**9, 128 * 2**20),
        ({}, "fp32", None, "all gradients and up to 1 MiB more, at most 128 MiB"),
        ({"buckets": "library"}, "fp32", 100, 128 * 2**20),
        ({"buckets": "library", "fusion_mb": 3}, "fp32", 100, 3 * 2**20),
        ({"fusion_mb": 0}, "fp32", 100, 0),
    ],
)
def test_the_fusion_buffer(options: dict[str, Any], precision: str, parameters: int | None, told: int | str) -> None:
    """Room for all gradients, unless the library's own size or another one is asked for."""
    config = Config.model_validate(
        {"backend": "horovod", "parallel": {"data": 2}, "device": "cpu", "batch": {"total": 4},
         "train": {"steps": 1, "precision": precision}, "options": {"horovod": options}}
    )  # fmt: skip
    assert registry.find_backend("horovod").native_config(config, parameters)["HOROVOD_FUSION_THRESHOLD"] == told


def test_what_horovod_is_told(tmp_path: Path) -> None:
    """The size is there when the library starts, and goes with the run."""
    with running(tasks.Plain(), tmp_path, backend="horovod"):
        assert os.environ["HOROVOD_FUSION_THRESHOLD"] == str(2**20)
    assert "HOROVOD_FUSION_THRESHOLD" not in os.environ


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"op": "adasum"},
         "op: adasum needs a Horovod built with MPI; `unipar install horovod` builds it with gloo, which answers "
         '"No Adasum operation enabled"; use average'),
        ({"process_sets": [[0, 4]]}, "process_sets: [0, 4] names rank 4; this world has 0 to 3"),
        ({"process_sets": [[1, 1]]}, "process_sets: [1, 1] names a rank twice"),
        ({"process_sets": [[3, 2, 1, 0]]},
         "process_sets: [3, 2, 1, 0] are all ranks, which Horovod knows already; leave it out"),
        ({"process_sets": [[0, 1], [1, 0]]}, "process_sets: [1, 0] is given twice; remove one"),
    ],
)  # fmt: skip
def test_refusals(options: dict[str, Any], reason: str) -> None:
    """Options are refused that Horovod would refuse in the middle of a run, or not at all."""
    made = {"backend": "horovod", "parallel": {"data": 4}, "batch": {"total": 8}, "train": {"steps": 1}}
    with pytest.raises(Unsupported) as e:
        checks.check_can_run(Config.model_validate(made | {"options": {"horovod": options}}))
    assert str(e.value) == f"horovod/nothing: options.horovod.{reason}"


def test_a_second_run_after_another_cycle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Horovod would end the process with a segfault."""
    monkeypatch.setattr("unipar_horovod.engine._cycle_times_set", [0.5])
    with pytest.raises(Unsupported) as e, running(tasks.Plain(), tmp_path, backend="horovod"):
        pass
    assert str(e.value) == (
        "horovod/nothing: options.horovod.cycle_ms: an earlier run in this process set it to 0.5, and Horovod crashes "
        "when it starts again after that; leave it out, or give each launch a process of its own"
    )
