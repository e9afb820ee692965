"""A character GPT whose gradients overflow in some steps, at any loss scale."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from typing_extensions import override

from tests.support.softcuda import findings
from tests.support.softcuda.trainings.stepwise import StepwiseGPT
from unipar.task import Run


class OverflowingGPT(StepwiseGPT):
    """Its loss is finite in every step."""

    def __init__(self, overflows: Sequence[int], **sizes: int) -> None:
        super().__init__(**sizes)
        self.overflows, self.number = overflows, 0

    @override
    def train(self, run: Run) -> None:
        for local_batch in run.batches():
            self.number = run.done + 1
            findings.begin_step(self.number)
            run.step(local_batch)
        findings.begin_step(0)

    @override
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss = super().loss(model, batch)
        return loss + (loss - loss.detach()) * 1e36 if self.number in self.overflows else loss
