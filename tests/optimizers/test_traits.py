"""Traits of optimizers' settings, beside what their classes do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from unipar.config.sections.optimizer import OPTIMIZERS
from unipar.model.parameter_groups import optimizer_class
from unipar.optimizers.block_states import BlockStates, block_tensors
from unipar.optimizers.matrix_optimizer import MatrixOptimizer
from unipar.optimizers.stochastic_rounding import RoundedMoments

SETTINGS: dict[str, dict[str, Any]] = {"sgd": {"momentum": 0.9}, "rmsprop": {"momentum": 0.9, "centered": True}}
"""Settings with which an optimizer has all states that it can have."""

OPTIMIZER_NAMES = pytest.mark.parametrize("name", [*OPTIMIZERS])


@OPTIMIZER_NAMES
def test_its_class_is_what_the_traits_say(name: str) -> None:
    """Who asks the settings and who asks the optimizer get the same answer."""
    settings = OPTIMIZERS[name]()
    kind = optimizer_class(settings)
    assert settings.whole_matrices == (settings.matrix_choice() is not None) == issubclass(kind, MatrixOptimizer)
    assert settings.moments_in_bf16 == issubclass(kind, RoundedMoments)
    assert settings.moments_in_blocks == issubclass(kind, BlockStates)
    assert (settings.moment_bytes is None) == (settings.full_moments is None)


@OPTIMIZER_NAMES
def test_its_states_are_what_the_traits_say(name: str) -> None:
    """A step with a gradient of zeros: decay that is added to the gradient enters a state, other decay does not."""
    settings = OPTIMIZERS[name].model_validate({"weight_decay": 0.1, **SETTINGS.get(name, {})})
    weight = nn.Parameter(torch.ones(64, 256))
    weight.grad = torch.zeros_like(weight)
    optimizer = optimizer_class(settings)([{"params": [weight], "matrices": False}], **settings.arguments("cpu"))  # pyright: ignore[reportCallIssue]
    optimizer.step()
    states: dict[str, Tensor] = {key: t for key, t in optimizer.state[weight].items() if t.numel() == weight.numel()}
    assert len(states) == settings.states
    values = [t.dequantize() if block_tensors(t) else t for t in states.values()]
    assert settings.decoupled == (not any(t.any() for t in values))
    codes = [block.codes if (block := block_tensors(t)) else t for t in states.values()]
    assert {t.element_size() for t in codes} == {settings.moment_bytes or weight.element_size()}
    assert (weight < 1.0).all()
    assert settings.gradient_sums.keys() & states.keys()
