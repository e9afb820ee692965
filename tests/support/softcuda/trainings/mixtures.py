"""Mixtures of experts as tasks whose loop tells the emulator which step it is in; they import transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from typing_extensions import override

from tests.support.expert_models import EXPERTS, OfTransformers, OfUser
from tests.support.softcuda.trainings.stepwise import Stepwise


class StepwiseMixtral(Stepwise, OfTransformers):
    """Transformers' Mixtral, or another of its mixtures."""


class StepwiseExperts(Stepwise, OfUser):
    """A user's experts."""


class EvenRouter(MixtralTopKRouter):
    """Router that gives each expert as many tokens, by their places."""

    @override
    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, weights, _ = super().forward(hidden_states)
        place = torch.arange(len(logits), device=logits.device)
        return logits, weights, torch.stack([place % EXPERTS, (place + 1) % EXPERTS], 1)


class EvenMixtral(OfTransformers):
    """A Mixtral whose ranks get as many rows as they send, as a plan assumes."""

    @override
    def model(self) -> nn.Module:
        model: Any = super().model()
        for layer in model.model.layers:
            layer.mlp.gate.__class__ = EvenRouter
        return model
