"""Contents of a checkpoint in words and as data."""

from __future__ import annotations

from pathlib import Path

from tests.support.checkpoints import save_on_ranks
from unipar.checkpoint.overview.checkpoint_contents import checkpoint_as_data, describe_checkpoint
from unipar.checkpoint.protocol.verifying import inspect_checkpoint

STATE = {
    "steps": 10,
    "strategy": "native/optimizer",
    "ranks": 2,
    "unipar": {"unipar": "0.1.0", "torch": "2.13.0"},
    "git": "abc",
    "data": {"epoch": 1, "sample": 12, "length": 100},
    "metrics": {"loss": 0.5},
    "best": [[1, 0.5]],
    "parts": {
        "model": {
            "skipped": 2,
            "counters": {"scale": 1024.0},
            "groups": [{"settings": {"lr": 0.1, "betas": [0.9, 0.999], "foreach": None}, "changed": []}],
            "tied": [["a.weight", "b.weight"]],
        }
    },
    "task": {"temperature": 1},
}


def test_a_checkpoint_in_words(tmp_path: Path) -> None:
    """State in sentences, and one row for each tensor with the kinds that are saved of it."""
    save_on_ranks(tmp_path, 4, state=STATE)
    path = tmp_path / "step-00000004"
    assert describe_checkpoint(inspect_checkpoint(path), width=100).splitlines() == [
        str(path),
        "step 4 of 10 by native/optimizer on 2 ranks",
        "versions: unipar 0.1.0, torch 2.13.0",
        "git: abc",
        "data: epoch 1, next sample 12, 100 samples",
        "metrics: loss 0.5",
        "best: step 1 (0.5)",
        "optimizer group 0: lr 0.1, betas [0.9, 0.999]",
        "steps whose update was skipped, for a norm that was not finite: 2",
        "numbers of the engine: scale 1024",
        "one parameter: a.weight = b.weight",
        "the task's own state: temperature",
        "1.5 KiB in 2 shards: weight 102 B, exp_avg 96 B, buffer 5 B, step 4 B",
        "",
        "name        shape   dtype   size  kinds",
        "net.bias    [3]     BF16     6 B  weight",
        "net.empty   [0, 4]  F64      0 B  weight",
        "net.mask    [5]     BOOL     5 B  buffer",
        "net.weight  [4, 6]  F32    192 B  weight exp_avg",
        "net.weight  []      F32      4 B  step",
    ]
    words = describe_checkpoint(inspect_checkpoint(path), only="*.bias", width=100).splitlines()
    assert words[-2:] == ["name      shape  dtype  size  kinds", "net.bias  [3]    BF16    6 B  weight"]


def test_a_checkpoint_as_data(tmp_path: Path) -> None:
    """Tensors, files and the whole state."""
    save_on_ranks(tmp_path, 4, state=STATE)
    data = checkpoint_as_data(inspect_checkpoint(tmp_path / "step-00000004"), "net.weight")
    assert [(t["kind"], t["dtype"], t["shape"], t["bytes"], t["pieces"]) for t in data["tensors"]] == [
        ("exp_avg", "F32", [4, 6], 96, 2),
        ("step", "F32", [], 4, 1),
        ("weight", "F32", [4, 6], 96, 2),
    ]
    assert data["step"] == 4
    assert data["state"]["metrics"] == {"loss": 0.5}
    assert sorted(data["files"]) == ["shards/rank-00000.safetensors", "shards/rank-00001.safetensors", "state.json"]
