"""A character GPT whose gradient is infinite in some steps, with a loss that is finite."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from examples.char_gpt import CharGPT

BAD = 3
"""Number of the step whose loss is finite on all ranks, and whose gradient is infinite on one."""


class OfRoot(CharGPT):
    """In step 3 the loss has a root at 0: it is finite, and its gradient is not."""

    def __init__(self, bad: int = BAD, last: int = BAD) -> None:
        super().__init__(layers=2, width=16, heads=2, context=8)
        self.bad, self.last, self.number = bad, last, 0

    @override
    def train(self, run: Any) -> None:
        for local_batch in run.batches():
            self.number = run.done + 1
            run.step(local_batch)

    @override
    def loss(self, model: Any, batch: Any) -> Any:
        loss = super().loss(model, batch)
        zero = (loss - loss.detach()).clamp(min=0.0)
        return loss + (zero.sqrt() if self.bad <= self.number <= self.last else zero * 0.0)
