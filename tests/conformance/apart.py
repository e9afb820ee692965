"""Several losses in a step, each with a backward of its own."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

import unipar
from tests.conformance import tasks


class Apart(tasks.Plain):
    """Several losses, each with a backward of its own; the last uses neither head nor `extra`, as the first does."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(extra=True, **settings)

    @override
    def train(self, run: unipar.Run) -> None:
        for local_batch in run.batches():
            run.step(local_batch, loss=self.losses())

    def losses(self) -> list[Any]:
        return [self.first, self.second]

    def first(self, model: Any, batch: tasks.Batch) -> Tensor:
        logits = tasks.to_float32(model(batch.tokens[:, :-1], use_extra=True))
        return F.cross_entropy(logits.transpose(1, 2), batch.tokens[:, 1:])

    def second(self, model: Any, batch: tasks.Batch) -> Tensor:
        return 0.1 * tasks.to_float32(model.encode(batch.tokens[:, 1:])).square().mean()
