"""Mixtures of experts as tasks whose loop tells the emulator which step it is in; they import transformers."""

from __future__ import annotations

from tests.support.expert_models import OfTransformers, OfUser
from tests.support.softcuda.trainings.stepwise import Stepwise


class StepwiseMixtral(Stepwise, OfTransformers):
    """Transformers' Mixtral, or another of its mixtures."""


class StepwiseExperts(Stepwise, OfUser):
    """A user's experts."""
