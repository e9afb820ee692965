"""Errors in the norm of the gradients and in the clip."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor
from typing_extensions import override
from unipar_native.fsdp2 import FSDP2Engine

from tests.support.healthy_engines import HealthyDDP
from unipar.backend import Engine, Part
from unipar.config import Config
from unipar.distributed.world import World
from unipar.engines.gradients import clip_gradients
from unipar.engines.state import local_part


@final
class ClipInverted(HealthyDDP):
    """Of 1 and the clip's coefficient the larger is taken instead of the smaller."""

    @override
    def norm(self) -> Tensor:
        norm = clip_gradients(self.trained, float("inf"))
        for p in self.trained:
            assert p.grad is not None
            p.grad.mul_((self.limit / (norm + 1e-6)).clamp(min=1.0))
        return norm


@final
class ClipScaled(HealthyDDP):
    """Gradients are clipped while the loss scale still multiplies them, and unscaled afterwards."""

    loss_scale = 2.0**16

    @override
    def backward(self, loss: Tensor) -> None:
        (loss * self.loss_scale).backward()

    @override
    def norm(self) -> Tensor:
        norm = clip_gradients(self.trained, self.limit)
        for p in self.trained:
            assert p.grad is not None
            p.grad.div_(self.loss_scale)
        return norm


@final
class ClipPerGroup(HealthyDDP):
    """Each group of the optimizer is clipped by itself."""

    @override
    def norm(self) -> Tensor:
        norm = clip_gradients(self.trained, float("inf"))
        for group in self.base.param_groups:
            clip_gradients(group["params"], self.limit)
        return norm


@final
class ReplicasCounted(HealthyDDP):
    """The squares are added up over all ranks, although each of them holds the whole gradient."""

    @override
    def norm(self) -> Tensor:
        norm = self.world.sum(clip_gradients(self.trained, float("inf")).square()).sqrt()
        for p in self.trained:
            assert p.grad is not None
            p.grad.mul_((self.limit / (norm + 1e-6)).clamp(max=1.0))
        return norm


def norm_of_shard(part: Part, config: Config, world: World) -> Engine:
    """Return FSDP2's engine, which clips rightly and reports the norm of what this rank holds."""
    engine: Any = FSDP2Engine(part, config, world)
    clip = engine.norm

    def clip_and_report() -> Tensor:
        held = torch.stack([local_part(p.grad).norm() for p in engine.trained]).norm()
        clip()
        return held

    engine.norm = clip_and_report
    return engine
