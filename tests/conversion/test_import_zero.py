"""`unipar import`: DeepSpeed's settings of how gradients travel, carried where they change something."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from unipar.conversion.import_config import ImportedConfig, import_library_config


def _read(zero: dict[str, Any], device: str, folder: Path) -> ImportedConfig:
    told = {"train_batch_size": 32, "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}}, "zero_optimization": zero}
    file = folder / "ds_config.json"
    file.write_text(json.dumps(told), encoding="utf-8")
    return import_library_config(file, ["train.steps=100", f"device={device}"])


@pytest.mark.parametrize(
    ("zero", "options"),
    [
        ({"stage": 2, "overlap_comm": True, "contiguous_gradients": False}, {"overlap": True, "contiguous": False}),
        ({"stage": 3, "overlap_comm": False, "contiguous_gradients": False}, {"overlap": False, "contiguous": False}),
    ],
)
def test_carried(zero: dict[str, Any], options: dict[str, Any], tmp_path: Path) -> None:
    """A setting is carried where it differs from what DeepSpeed does by itself."""
    made = _read(zero, "cuda", tmp_path)
    assert made.config.options == {"deepspeed": options}
    assert made.left_out == ()


@pytest.mark.parametrize(
    ("zero", "device", "said"),
    [
        ({"stage": 3, "overlap_comm": True}, "cuda",
         "overlap_comm: true is what DeepSpeed does at this stage by itself"),
        ({"stage": 2, "overlap_comm": False}, "cuda",
         "overlap_comm: false is what DeepSpeed does at this stage by itself"),
        ({"stage": 2, "overlap_comm": True}, "cpu", "overlap_comm: the CPU has no streams"),
        ({"stage": 3, "overlap_comm": "auto"}, "cuda", "overlap_comm: DeepSpeed decides"),
        ({"stage": 0, "overlap_comm": True}, "cuda", "overlap_comm: it has no effect at this stage"),
        ({"stage": 2, "contiguous_gradients": True}, "cuda",
         "contiguous_gradients: true is what DeepSpeed does at this stage by itself"),
        ({"stage": 1, "contiguous_gradients": False, "offload_optimizer": {"device": "cpu"}}, "cuda",
         "contiguous_gradients: DeepSpeed always copies what is offloaded"),
    ],
)  # fmt: skip
def test_left_out(zero: dict[str, Any], device: str, said: str, tmp_path: Path) -> None:
    """A setting that changes nothing is left out, with the reason."""
    made = _read(zero, device, tmp_path)
    assert made.left_out == (f"zero_optimization.{said}",)
    assert not {"overlap", "contiguous"} & made.config.options.get("deepspeed", {}).keys()


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A file from a machine with GPUs is read on one without: `device: auto` is the CPU there."""
    for gpus, options in ((0, {}), (1, {"deepspeed": {"overlap": True}})):
        monkeypatch.setattr("unipar.distributed.accelerators.count_visible_gpus", lambda found=gpus: found)
        assert _read({"stage": 2, "overlap_comm": True}, "auto", tmp_path).config.options == options
