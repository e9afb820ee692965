"""Errors in how gradients are accumulated over microbatches and reduced over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor
from typing_extensions import override

from tests.support.healthy_engines import HealthyByHand, HealthyDDP
from unipar.backend import LossFn, Micro
from unipar.engines.gradients import scale_loss


@final
class DividedAgain(HealthyDDP):
    """The backward hook divides by the number of microbatches, whether the loss was scaled or not."""

    count = 1

    @override
    def sync(self, micros: int, *, last: bool) -> AbstractContextManager[Any]:
        self.count = micros
        return super().sync(micros, last=last)

    @override
    def backward(self, loss: Tensor) -> None:
        (loss / self.count).backward()


@final
class TimesAccumulation(HealthyDDP):
    """Nobody divides by the number of microbatches."""

    count = 1

    @override
    def sync(self, micros: int, *, last: bool) -> AbstractContextManager[Any]:
        self.count = micros
        return super().sync(micros, last=last)

    @override
    def backward(self, loss: Tensor) -> None:
        (loss * self.count).backward()


@final
class AveragedAgain(HealthyDDP):
    """The loss was divided by the tokens of all ranks already, and DDP still takes a mean."""

    @override
    def finish_reduction(self) -> None:
        for p in self.trained:
            if p.grad is not None:
                p.grad.div_(self.world.size)


@final
class Discarded(HealthyByHand):
    """Each backward is taken for a boundary, at which the accumulated gradients are set aside."""

    @override
    def backward(self, loss: Tensor) -> None:
        for p in self.trained:
            p.grad = None
        loss.backward()


@final
class ReducedBeforeLast(HealthyByHand):
    """The last microbatch's gradient is added to the accumulator after the accumulator was reduced."""

    last = False

    @override
    def sync(self, micros: int, *, last: bool) -> AbstractContextManager[Any]:
        self.last = last
        return super().sync(micros, last=last)

    @override
    def backward(self, loss: Tensor) -> None:
        if self.last:
            self.average()
        loss.backward()

    @override
    def finish_reduction(self) -> None:
        """Reduce nothing any more."""


@final
class NotZeroed(HealthyDDP):
    """The step does not clear gradients, and the next one adds to them."""

    @override
    def update(self) -> None:
        self.base.step()


@final
class MeanOfMeans(HealthyDDP):
    """Each microbatch's mean over its own tokens counts alike, however many tokens it has."""

    @override
    def run_microbatches(self, fn: LossFn, micros: Sequence[Micro], divisor: float, mark: Any) -> Tensor:
        share: Tensor | None = None
        for i, micro in enumerate(micros, 1):
            with self.sync(len(micros), last=i == len(micros)):
                loss = self.forward_loss(fn, micro)
                mine, share = scale_loss(loss, 1.0 / (len(micros) * self.world.size), divisor, share)
                self.backward(mine)
        assert share is not None
        return share


@final
class ShardScaled(HealthyByHand):
    """What was accumulated is divided by the ranks, instead of the gradient that is added to it."""

    @override
    def backward(self, loss: Tensor) -> None:
        for p in self.trained:
            if p.grad is not None:
                p.grad.div_(self.world.size)
        loss.backward()

    @override
    def finish_reduction(self) -> None:
        for p in self.trained:
            if p.grad is not None:
                self.world.sum(p.grad)


@final
class DoubledEachTime(HealthyByHand):
    """A reduction over a single rank adds the buffer to itself, in every microbatch."""

    @override
    def backward(self, loss: Tensor) -> None:
        loss.backward()
        for p in self.trained:
            if p.grad is not None:
                p.grad.mul_(2)


@final
class AccumulatedInBf16(HealthyByHand):
    """Gradients are accumulated in bf16, and only the sum is reduced in fp32."""

    @override
    def backward(self, loss: Tensor) -> None:
        loss.backward()
        for p in self.trained:
            if p.grad is not None:
                p.grad.copy_(p.grad.to(torch.bfloat16))


@final
class LocalCounts(HealthyDDP):
    """The loss is divided by the tokens of this rank, and a mean over ranks follows."""

    @override
    def run_microbatches(self, fn: LossFn, micros: Sequence[Micro], divisor: float, mark: Any) -> Tensor:
        own = sum(micro.scale for micro in micros) * self.world.size
        alike = [replace(micro, scale=micro.scale / own) for micro in micros]
        return super().run_microbatches(fn, alike, divisor, mark)
