"""Errors in how gradients are accumulated over microbatches and reduced over ranks."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, final

from torch import Tensor
from typing_extensions import override

from corpus_backend.healthy import HealthyByHand, HealthyDDP


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
            assert p.grad is not None
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
class NotZeroed(HealthyDDP):
    """The step does not clear gradients, and the next one adds to them."""

    @override
    def update(self) -> None:
        self.base.step()
