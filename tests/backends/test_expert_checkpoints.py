"""Checkpoints of experts over ranks: other strategies go on from them, and transformers loads what they export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import unipar
from tests.support.expert_models import OfTransformers
from tests.support.world import ROOT
from unipar.checkpoint.exporting.writing import ExportWish, export_checkpoint
from unipar.checkpoint.protocol.verifying import verify_checkpoint
from unipar.checkpoint.saved_state import SavedState

pytestmark = pytest.mark.forked

MIXTRAL = {"use": f"{ROOT}/tests/support/expert_models.py:OfTransformers", "args": {"auxiliary": False}}
STEPS, SAVED = 4, 2
ONE: dict[str, Any] = {"backend": "single"}
EXPERT2: dict[str, Any] = {"parallel": {"data": 2, "expert": 2, "shard": "parameters"}}
EXPERT4: dict[str, Any] = {"parallel": {"data": 4, "expert": 4}}
TENSOR2: dict[str, Any] = {"parallel": {"data": 1, "tensor": 2}}


def losses(out: Path, strategy: dict[str, Any], steps: int = STEPS, **more: Any) -> list[float]:
    """Return the losses of a training in a strategy."""
    config = {
        "task": MIXTRAL,
        "device": "cpu",
        "batch": {"total": 8, "micro": 2},
        "train": {"steps": steps, "optimizer": {"name": "adamw", "lr": 1e-2}, "clip": 0.5},
        "log": {"every": 1},
        "out": str(out),
        **strategy,
        **more,
    }
    return [loss for _, loss in unipar.launch(config, quiet=True).losses]


def saved_in(out: Path, strategy: dict[str, Any]) -> Path:
    """Return the checkpoint of a training."""
    losses(out, strategy, SAVED, checkpoint={"every": None})
    return out / f"checkpoints/step-{SAVED:08d}"


@pytest.mark.parametrize(
    ("first", "then"),
    [
        pytest.param(EXPERT2, TENSOR2, id="expert2 to tensor2"),
        pytest.param(TENSOR2, EXPERT2, id="tensor2 to expert2", marks=pytest.mark.sweep),
        pytest.param(EXPERT2, EXPERT4, id="expert2 to expert4", marks=pytest.mark.sweep),
        pytest.param(EXPERT4, EXPERT2, id="expert4 to expert2", marks=pytest.mark.sweep),
        pytest.param(EXPERT4, TENSOR2, id="expert4 to tensor2", marks=pytest.mark.sweep),
        pytest.param(EXPERT4, ONE, id="expert4 to one", marks=pytest.mark.sweep),
        pytest.param(ONE, EXPERT4, id="one to expert4", marks=pytest.mark.sweep),
    ],
)
def test_state_moves(tmp_path: Path, first: dict[str, Any], then: dict[str, Any]) -> None:
    """A strategy goes on from the weights and moments of another with the losses of one process."""
    alone = losses(tmp_path / "alone", ONE)
    again = losses(tmp_path / "then", then, resume=str(saved_in(tmp_path / "first", first)))
    assert again == pytest.approx(alone[SAVED:], rel=1e-5)


def test_transformers_loads_what_experts_export(tmp_path: Path) -> None:
    """Each expert is in its place: the same weights, no key missing, and the same training from the exported folder."""
    contents = verify_checkpoint(saved_in(tmp_path / "first", EXPERT2))
    export_checkpoint(contents, tmp_path / "hf", ExportWish(to="hf", size="20KB"))
    both: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    loaded, said = both
    assert not any(said[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with SavedState(contents.path, contents.manifest) as state:
        saved = {name: state.whole(name, "weight") for name, _ in OfTransformers().model().named_parameters()}
    assert {name for name, p in loaded.named_parameters() if not torch.equal(p, saved[name])} == set()
    weights: dict[str, Any] = {"model": {"weights": str(tmp_path / "hf")}}
    alone = losses(tmp_path / "alone", ONE, **weights)
    assert alone[0] != pytest.approx(losses(tmp_path / "new", ONE, 1)[0], rel=1e-3)
    assert losses(tmp_path / "again", EXPERT2, **weights) == pytest.approx(alone, rel=1e-5)
