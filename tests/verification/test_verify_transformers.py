"""Models of transformers under `verify`: GPT-2, a BERT that is trained in part, Mixtral, which cannot run in fp64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.support.world import PYTHONPATH_VARIABLE
from unipar.results.verdicts import Verdicts
from unipar.verification.verify import verify

pytestmark = pytest.mark.forked

STRATEGIES = ("native/nothing", "native/parameters")


@pytest.fixture
def prove(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Verdicts]:
    """Function that verifies a model over three steps of eight samples."""
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH_VARIABLE["PYTHONPATH"])
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def proved(name: str, strategies: Sequence[str] = STRATEGIES) -> Verdicts:
        config = {
            "device": "cpu",
            "batch": {"total": 8, "micro": 2},
            "train": {"steps": 20, "optimizer": {"name": "adamw", "lr": 1e-3}, "clip": 1.0},
            "out": str(tmp_path),
            "task": {"use": name if ":" in name else f"tests.support.transformer_models:{name}"},
        }
        return verify(config, strategies=strategies, world=2, steps=3)

    return proved


@pytest.mark.sweep
def test_llama_in_parts(prove: Callable[..., Verdicts]) -> None:
    """Its blocks split over two ranks, and shared out among two: rotary tables and masks come by keyword."""
    model = str(Path(__file__).parents[2] / "benchmarks" / "mesh_models.py:Llama")
    found = prove(model, ("native/nothing+tensor2", "native/nothing+pipeline2"))
    assert [(row.outcome, row.note) for row in found.rows] == [("agrees", ""), ("agrees", "")]


def test_a_gradient_that_is_mostly_rounding(prove: Callable[..., Verdicts]) -> None:
    """How each sample is rounded moves the norm a hundred times farther than how a batch is cut: no false alarm."""
    found = prove("PartlyTrainedBert", ("native/nothing+tensor2",))
    assert [(row.outcome, row.note) for row in found.rows] == [("agrees", "")]
    base = found.one["one process"]["norm"][1]
    off = {name: abs(run["norm"][1] - base) / base for name, run in found.one.items()}
    cuts = [value for name, value in off.items() if "microbatches of" in name]
    parts = [value for name, value in off.items() if "matrix products in" in name]
    assert (len(cuts), len(parts)) == (2, 5)
    assert max(parts) > 20 * max(cuts)


@pytest.mark.sweep
def test_gpt2(prove: Callable[[str], Verdicts]) -> None:
    """Both strategies are bit-for-bit equal to a replay, and nothing but dropout is remarked."""
    found = prove("Gpt2")
    assert [(row.outcome, row.bits) for row in found.rows] == [("agrees", "shares"), ("agrees", "micros")]
    assert found.summary == "all 2 strategies agree with one process over 3 steps on 2 ranks"
    assert found.fp64_error == ""
    assert [remark.partition(":")[0] for remark in found.remarks] == ["dropout is set to 0 for this verification"]


@pytest.mark.sweep
def test_mixtral(prove: Callable[[str], Verdicts]) -> None:
    """Its kernel takes no fp64: the spread comes from runs in fp32, a line says so, and the strategies are verified."""
    found = prove("Mixtral")
    assert [(row.outcome, row.bits) for row in found.rows] == [("agrees", "shares"), ("agrees", "micros")]
    assert found.code == 0
    error = "RuntimeError: Expected mat_a to be Float32, BFloat16 or Float16 matrix, got Double"
    assert found.fp64_error == error
    said = (
        f"the model cannot run in fp64 ({error}), and runs on the same microbatches in fp32: the spread comes from "
        "other microbatches, other orders of addition and weights that were changed in the last place"
    )
    assert found.remarks == [said]
    page = (Path(found.out) / "report.html").read_text("utf-8")
    assert "the model cannot run in fp64 (RuntimeError: Expected mat_a to be Float32" in page
    assert "a replay, share by share, as configured, weights changed in the last place" in found.one
