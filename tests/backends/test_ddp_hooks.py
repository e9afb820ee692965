"""DDP's communication hooks and static graph: what they cost in digits, and where they are refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conformance.tolerances import Tolerance
from tests.support.settings import Rows, assert_agrees, run_rows
from unipar.backend import checks, registry
from unipar.config import Config
from unipar.config.sections.strategy import Shard, Strategy
from unipar.errors import Unsupported

pytestmark = pytest.mark.forked

POWER = {"hook": "powersgd", "powersgd_rank": 4, "powersgd_start": 2}
ROWS: Rows = [
    {"name": "fp16", "strategy": "native/nothing", "options": {"native": {"hook": "fp16"}}},
    {"name": "later", "strategy": "native/nothing", "options": {"native": {"hook": "powersgd"}}},
    {"name": "powersgd", "strategy": "native/nothing", "options": {"native": POWER}},
    {"name": "static", "strategy": "native/nothing", "options": {"native": {"static_graph": True}}},
    {"name": "split", "strategy": "native/optimizer", "options": {"native": {"static_graph": True, "hook": "fp16"}}},
]
HALF = Tolerance(loss=2e-3, norm=2e-2, params=None)
MATRICES = Tolerance(loss=0.5, norm=1.0, params=None)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    return run_rows(ROWS, tmp_path_factory.mktemp("hooks"))


@pytest.mark.parametrize("name", ["static", "later"])
def test_nothing_is_lost(played: dict[str, list[dict[str, Any]]], name: str) -> None:
    """With a graph that stays the same, over several microbatches; and before PowerSGD begins."""
    assert_agrees(next(row for row in ROWS if row["name"] == name), played[name])


@pytest.mark.parametrize("name", ["fp16", "split"])
def test_half_gradients(played: dict[str, list[dict[str, Any]]], name: str) -> None:
    """fp16 on the way, in the first step too: near, and no longer as near as whole ones."""
    row = next(row for row in ROWS if row["name"] == name)
    assert_agrees(row, played[name], HALF)
    with pytest.raises(AssertionError):
        assert_agrees(row, played[name])


def test_thin_matrices(played: dict[str, list[dict[str, Any]]]) -> None:
    """PowerSGD's: it trains, on another way than half precision."""
    row = next(row for row in ROWS if row["name"] == "powersgd")
    assert_agrees(row, played["powersgd"], MATRICES)
    with pytest.raises(AssertionError):
        assert_agrees(row, played["powersgd"], HALF)


@pytest.mark.parametrize(
    ("shard", "native", "sections", "reason"),
    [
        (
            "nothing",
            {"hook": "bf16"},
            {},
            "options.native.hook: bf16 is not available: torch's hook asks for NCCL, and the CPU has gloo; use fp16",
        ),
        (
            "nothing",
            {"hook": "powersgd"},
            {"train": {"steps": 1, "precision": "fp16"}},
            "options.native.hook: powersgd is not available with precision: fp16: a gradient that overflows would stay "
            "in PowerSGD's memory of errors, though its step is skipped; use bf16-mixed, or hook: fp16",
        ),
        (
            "nothing",
            {"hook": "powersgd"},
            {"checkpoint": {"every": 1}},
            "options.native.hook: powersgd is not available with checkpoint: the errors that PowerSGD adds to the next "
            "step's gradients cannot be saved, so that a run would go on otherwise; leave one of them out",
        ),
        (
            "parameters",
            {"hook": "fp16"},
            {},
            "options.native.hook: fp16 is not available: it is DDP's, which this strategy does not use; leave it out",
        ),
        (
            "nothing",
            {"static_graph": True, "find_unused_parameters": True},
            {},
            "options.native.static_graph: true and find_unused_parameters: true exclude each other: a graph that is "
            "the same in every step leaves nothing to search for; leave one of them out",
        ),
    ],
)
def test_where_it_cannot(shard: Shard, native: dict[str, Any], sections: dict[str, Any], reason: str) -> None:
    """A sentence with the key, the reason and the way out."""
    config = Config.model_validate(
        {
            "backend": "native",
            "device": "cpu",
            "parallel": {"data": 2, "shard": shard},
            "batch": {"total": 4},
            "train": {"steps": 1},
            "options": {"native": native},
            **sections,
        }
    )
    reasons = list(checks.list_refusals(registry.find_backend("native"), config, Strategy("native", shard)))
    assert reason in reasons


def test_it_is_not_planned() -> None:
    """`unipar plan` says what measures it."""
    from unipar_native.prediction import predict_native

    config = Config.model_validate(
        {
            "backend": "native",
            "device": "cpu",
            "parallel": {"data": 2},
            "batch": {"total": 4},
            "train": {"steps": 1},
            "options": {"native": {"hook": "fp16"}},
        }
    )
    with pytest.raises(
        Unsupported, match=r"options\.native\.hook: fp16 is not planned yet; `unipar compare` measures it"
    ):
        predict_native(config, timeline=Any, ranks=2, device="cpu")  # type: ignore[arg-type]
