"""Averages of weights (`train.ema`) from one checkpoint to the next, each saved by another backend and world."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import unipar
from tests.support.world import ROOT
from unipar.backend.offered_strategies import config_in_strategy
from unipar.checkpoint.exporting.writing import ExportWish, export_checkpoint
from unipar.checkpoint.protocol.verifying import inspect_checkpoint
from unipar.checkpoint.saved_state import SavedState
from unipar.config import Config, Strategy
from unipar.config.sections.train import Ema

pytestmark = pytest.mark.forked

GPT = {"use": f"{ROOT}/examples/char_gpt.py:CharGPT", "args": {"layers": 2, "width": 16, "heads": 2, "context": 8}}
DECAY, WARMUP = 0.9, 2


def train(strategy: str, ranks: int, steps: int, out: Path, start: Path | None, **changes: Any) -> Path:
    """Return the checkpoint after so many steps in a strategy, begun anew or from a checkpoint."""
    made = Config.model_validate(
        {
            "task": GPT,
            "device": "cpu",
            "parallel": {"data": ranks},
            "batch": {"total": 12},
            "train": {
                "steps": steps,
                "optimizer": {"name": "adamw", "lr": 0.01},
                "ema": {"decay": DECAY, "warmup": WARMUP},
            },
            "checkpoint": {},
            "out": str(out),
            "resume": None if start is None else str(start),
        }
    )
    config = config_in_strategy(made, Strategy.parse(strategy)).changed(changes)
    unipar.launch(config, quiet=True)
    return out / "checkpoints" / f"step-{steps:08d}"


def tensors(checkpoint: Path, kind: str) -> dict[str, Tensor]:
    """Return the whole tensors of a kind by name."""
    contents = inspect_checkpoint(checkpoint)
    with SavedState(checkpoint, contents.manifest) as saved:
        return {name: saved.whole(name, kind) for name, its in contents.manifest.tensors if its == kind}


def moved(before: dict[str, Tensor], weights: dict[str, Tensor], update: int) -> dict[str, Tensor]:
    """Return the averages after the update of this number, as one process computes them."""
    share = 1 - min(DECAY, update / (update + WARMUP))
    return {name: average + share * (weights[name] - average) for name, average in before.items()}


@pytest.mark.parametrize(
    "chain",
    [
        [
            *[("native/parameters", 2), ("deepspeed/optimizer", 2), ("native/nothing+tensor2", 2)],
            *[("deepspeed/parameters", 3), ("horovod/nothing", 1)],
        ],
        pytest.param(
            [
                *[("horovod/nothing", 2), ("native/optimizer", 4), ("deepspeed/parameters", 2), ("single", 1)],
                *[("accelerate/parameters", 2), ("native/nothing+pipeline2", 2), ("accelerate/gradients+zero", 2)],
                *[("deepspeed/nothing", 2), ("native/parameters+tensor2", 4), ("native/nothing+context2", 2)],
                *[("deepspeed/gradients", 3), ("accelerate/nothing", 2), ("native/parameters", 3)],
            ],
            marks=pytest.mark.sweep,
        ),
    ],
)  # fmt: skip
def test_each_strategy_goes_on_from_what_another_has_saved(chain: Sequence[tuple[str, int]], tmp_path: Path) -> None:
    """One step in each: its averages have the bits that follow from those saved before, in any world."""
    start: Path | None = None
    for step, (strategy, ranks) in enumerate(chain, 1):
        path = train(strategy, ranks, step, tmp_path / str(step), start)
        weights, averages = tensors(path, "weight"), tensors(path, "average")
        assert averages.keys() == weights.keys()
        if start is not None:
            expected = moved(tensors(start, "average"), weights, step)
            assert [n for n, t in averages.items() if not torch.equal(t, expected[n])] == [], strategy
        assert not any(torch.equal(t, weights[n]) for n, t in averages.items())
        start = path
    assert start is not None
    done = export_checkpoint(inspect_checkpoint(start), tmp_path / "out.safetensors", ExportWish())
    exported, averages = load_file(done.path), tensors(start, "average")
    assert done.averages == len(averages)
    assert all(torch.equal(exported[name], t) for name, t in averages.items())


def test_averages_that_begin_with_a_checkpoint(tmp_path: Path) -> None:
    """One without averages: they begin as its weights are, and a line tells the change; the other way they are left."""
    first = train("native/nothing", 1, 1, tmp_path / "first", None, **{"train.ema": None})
    assert tensors(first, "average") == {}
    second = train("native/nothing", 1, 2, tmp_path / "second", first)
    expected = moved(tensors(first, "weight"), tensors(second, "weight"), 1)
    assert all(torch.equal(t, expected[n]) for n, t in tensors(second, "average").items())
    third = train("native/nothing", 1, 3, tmp_path / "third", second, **{"train.ema": None})
    assert tensors(third, "average") == {}
    assert "train.ema.decay was null and is 0.9" in (tmp_path / "second" / "rank-0.jsonl").read_text("utf-8")


def test_another_decay_is_told(tmp_path: Path) -> None:
    """And holds from the next update on."""
    first = train("native/nothing", 1, 2, tmp_path / "first", None)
    second = train("native/nothing", 1, 3, tmp_path / "second", first, **{"train.ema": Ema(decay=0.25)})
    before, weights = tensors(first, "average"), tensors(second, "weight")
    expected = {name: average + (1 - 0.25) * (weights[name] - average) for name, average in before.items()}
    assert all(torch.equal(t, expected[n]) for n, t in tensors(second, "average").items())
    assert "train.ema.decay: 0.9 -> 0.25 (the script)" in (tmp_path / "second" / "rank-0.jsonl").read_text("utf-8")
