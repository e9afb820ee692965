"""What an optimizer needs for a moment in its update, by its own code on tensors without memory."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from tests.support.short_text import short_text
from unipar.config.config_source import load_given_config
from unipar.prediction.timeline import UpdatedTensor
from unipar.training.fake_run.trace_task import TracedTask, trace_task

LARGE, SMALL = UpdatedTensor((1000, 10), 4), UpdatedTensor((100, 10), 4)

OWN = """
import torch
from examples.char_gpt import CharGPT

class Own(CharGPT):
    def optimizer(self, groups):
        return torch.optim.{made}
"""


def traced(device: str = "cpu", task: dict[str, Any] | None = None, **optimizer: Any) -> TracedTask:
    train = {"steps": 1, **({"optimizer": optimizer} if optimizer else {})}
    config = {"task": task or short_text(), "batch": {"total": 8}, "device": device, "train": train}
    return trace_task(load_given_config(config).config, 2)


def temporaries(found: TracedTask, tensors: list[UpdatedTensor], *, split: bool = False) -> int:
    assert found.timeline.temporaries_of_update is not None
    return found.timeline.temporaries_of_update(tensors, split=split)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("optimizer", "one", "two", "several"),
    [
        pytest.param({}, 0, 0, 0, id="fused"),
        pytest.param({"fused": False}, 80_000, 120_000, 120_000, id="a loop, which keeps one of the tensor before"),
        pytest.param({"foreach": True}, 40_000, 80_000, 124_000, id="all at once"),
        pytest.param({"name": "sgd", "momentum": 0.9, "fused": False}, 0, 0, 0, id="sgd, in place"),
    ],
)
def test_the_optimizers_own_tensors(device: str, optimizer: dict[str, Any], one: int, two: int, several: int) -> None:
    """Two temporaries of the largest tensor in Adam's loop, and one of each tensor where it updates all together."""
    found = traced(device, **optimizer)
    assert temporaries(found, [LARGE]) == one
    assert temporaries(found, [LARGE, LARGE]) == two
    assert temporaries(found, [LARGE, LARGE, LARGE, SMALL]) == several


def test_parts_that_are_split_have_no_fused_sgd() -> None:
    """PyTorch's SGD with weight decay makes a tensor for them, as large as the largest."""
    found = traced(name="sgd", momentum=0.9, weight_decay=0.1)
    assert temporaries(found, [LARGE, SMALL]) == 0
    assert temporaries(found, [LARGE, SMALL], split=True) == 40_000


@pytest.mark.parametrize(
    ("made", "device", "expected"),
    [("NAdam(groups)", "cpu", 120_000), ("NAdam(groups)", "cuda", 84_000), ("AdamW(groups, fused=True)", "cpu", 0)],
)
def test_the_optimizer_of_a_task(tmp_path: Path, made: str, device: str, expected: int) -> None:
    """The task's own optimizer is asked; a fused one has none, and on CUDA PyTorch updates all at once."""
    (tmp_path / "own.py").write_text(OWN.format(made=made), "utf-8")
    args = {"layers": 1, "width": 16, "heads": 2, "context": 8}
    found = traced(device, {"use": f"{tmp_path}/own.py:Own", "args": args})
    assert temporaries(found, [LARGE, LARGE, SMALL]) == expected


@pytest.mark.parametrize(("device", "update"), [("cpu", 3_483_656), ("cuda", 111_413_256)])
def test_states_in_blocks(device: str, update: int) -> None:
    """Codes, a scale for each block of 32, and a table of 256 numbers for each moment; fp32 where rows are no blocks.

    An update takes 53 bytes for each of the elements that it takes at once: 65,536 on the CPU, here all on a GPU.
    """
    task = short_text()
    task["args"] |= {"width": 64, "heads": 2}
    found = traced(device, task, name="adamw-8bit", block=32)
    kept = {p.name: (p.states, p.tables) for p in found.timeline.parameters}
    assert kept["layers.0.mlp.0.weight"] == ((1, Fraction(1, 8), 1, Fraction(1, 8)), 2048)
    assert kept["layers.0.mlp.0.bias"] == ((4, 4), 0)
    assert temporaries(found, [UpdatedTensor((2048, 1024), 4)]) == update
    assert temporaries(found, [UpdatedTensor((2048, 1024), 4), SMALL]) == update


@pytest.mark.parametrize(("device", "update"), [("cpu", 28 * 2**16), ("cuda", 28 * 2**21)])
def test_moments_in_bf16(device: str, update: int) -> None:
    """Two bytes for each element of a moment; an update takes moments in fp32, and their roundings."""
    found = traced(device, name="adamw-bf16")
    assert {p.states for p in found.timeline.parameters} == {(2, 2)}
    assert temporaries(found, [UpdatedTensor((2048, 1024), 4)]) == update
