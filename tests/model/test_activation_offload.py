"""Activations that leave for host memory: which do, on tensors without memory, and configs that are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from typing_extensions import override

from unipar.backend import checks
from unipar.config import Config
from unipar.config import config_source as source
from unipar.errors import ConfigError, Unsupported
from unipar.model.transforms import apply_transforms
from unipar.training.fake_run.step_recorder import StepRecorder

SAVED = 16 * 256 * 4
"""Bytes of an activation."""


class Block(nn.Module):
    """Block that saves its input, the norm's output, which two layers take, and their product's two factors."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.gate = nn.LayerNorm(256), nn.Linear(256, 256), nn.Linear(256, 256)
        self.register_buffer("mask", torch.ones(16, 256))

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return self.up(y) * self.gate(y) * self.mask


def config(model: dict[str, Any], **sections: Any) -> Config:
    made = {"device": "cuda", "batch": {"total": 4}, "train": {"steps": 1}, "model": model, **sections}
    return source.load_given_config(made).config


@pytest.mark.parametrize(
    ("settings", "host", "device"),
    [
        ({}, 0, 16),
        ({"offload": "activations"}, 12, 4),
        ({"offload": "activations", "recompute": "blocks"}, 3, 1),
    ],
)
def test_what_leaves(settings: dict[str, Any], host: int, device: int) -> None:
    """Each memory once, however many layers take it; parameters, buffers and the last block's activations stay.

    Of a recomputed block its input leaves. In backward all come back.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        model = nn.Sequential(*(Block() for _ in range(4)))
        x = torch.ones(16, 256, requires_grad=True)
    apply_transforms(model, ["0", "1", "2", "3"], config(settings))
    recorder = StepRecorder([*model.parameters(), *model.buffers()])
    with mode, recorder:
        x = x * 1
        loss = model(x).sum()
        del x
        large = [block for block in recorder.blocks if block.died is None and block.size >= SAVED]
        assert {block.size for block in large} == {SAVED}
        assert sum(block.place == "host" for block in large) == host
        assert sum(block.place == "device" for block in large) == device
        loss.backward()
        assert [block for block in recorder.blocks if block.died is None and block.place == "host"] == []


def test_too_few_blocks() -> None:
    """What one block saves would leave while nothing runs."""
    with pytest.raises(ConfigError) as e:
        apply_transforms(nn.Sequential(Block()), ["0"], config({"offload": "activations"}))
    assert str(e.value) == (
        "model.offload: activations moves what a block saves while others run, and the model has 1 blocks: name two or "
        "more in model.blocks or in the task's blocks(), or leave activations out"
    )


CPU = "needs CUDA: on the CPU everything is in host memory; leave it out"


@pytest.mark.parametrize(
    ("model", "sections", "message"),
    [
        ({"offload": "activations"}, {"device": "cpu"}, f"model.offload: activations {CPU}"),
        ({"offload": ["parameters", "activations"]}, {"device": "cpu", "parallel": {"shard": "parameters"}},
         f"model.offload: [parameters, activations] {CPU}"),
        ({"offload": "activations"}, {"device": "mps"},
         "model.offload: activations is not available with device: mps, which has no memory of its own; leave it out"),
        ({"offload": "activations", "recompute": "selective"}, {},
         "model.offload: activations is not available with model.recompute: selective: torch keeps results of its "
         "operations where autograd's hooks do not see them; take recompute: blocks, whose inputs are moved"),
        ({"offload": "activations", "compile": "model"}, {},
         "model.offload: activations is not available with model.compile: model: blocks do not run one by one; say "
         "compile: blocks"),
        ({"offload": ["optimizer", "activations"]}, {"parallel": {"shard": "parameters"}},
         "model.offload: optimizer is not available: FSDP2 moves parameters, gradients and the optimizer's states "
         "together; say model.offload: parameters"),
    ],
)  # fmt: skip
def test_refusals(model: dict[str, Any], sections: dict[str, Any], message: str) -> None:
    """In a sentence, before any process starts."""
    with pytest.raises(Unsupported) as e:
        checks.check_can_run(config(model, **sections))
    assert [reason for reason in e.value.reasons if "offload" in reason] == [message]


@pytest.mark.parametrize("pair", [["activations"], ["optimizer", "parameters"], ["activations", "activations"]])
def test_pairs_that_are_none(pair: list[str]) -> None:
    """Two words are state and activations."""
    with pytest.raises(ConfigError) as e:
        config({"offload": pair})
    assert str(e.value).endswith(
        f"offload: [{', '.join(pair)}] is no pair of state and activations: write [optimizer, activations], "
        "[parameters, activations] (parameters has the optimizer's states, too), or one word"
    )
