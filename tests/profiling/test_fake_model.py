"""A copy of a model without values: the same operations, and nothing of it left in the task."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from unipar.backend import Micro
from unipar.profiling.fake_model import FakeModel, explain_uncounted


class Remembers:
    """A task whose loss keeps what it has seen."""

    def __init__(self) -> None:
        self.last: Tensor | None = None
        self.seen: list[Tensor] = []

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        value: Tensor = model(batch).mean()
        self.last = value
        self.seen.append(value)
        return value


def fake(count: int, loss: Any = None) -> Any:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    micros = [Micro(torch.ones(4, 8), 0.5) for _ in range(count)]
    return FakeModel(model).count(loss or Remembers().loss, micros), model


def test_every_microbatch_counts_and_the_model_stays() -> None:
    """Two microbatches: forward 2 x 512, backward without the gradient of the batch 3 x 512; no gradient is left."""
    counter, model = fake(2)
    assert counter.flops == 2 * 5 * 512
    assert [p.grad for p in model.parameters()] == [None, None]


def test_a_task_keeps_nothing_of_it() -> None:
    """What a loss stores in its task is stored in a copy."""
    task = Remembers()
    assert fake(1, task.loss)[0].flops == 5 * 512
    assert (task.last, task.seen) == (None, [])


def needs_values(model: nn.Module, batch: Any) -> Tensor:
    return model(batch).mean() * (2 if model(batch).sum().item() > 0 else 1)


def talks(model: nn.Module, batch: Any) -> Tensor:
    return torch.ops._c10d_functional.all_reduce(model(batch), "sum", "0").mean()


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (
            needs_values,
            "the model does not run without values (DataDependentOutputException: aten._local_scalar_dense.default)",
        ),
        (talks, "loss() calls a collective (all_reduce.default)"),
    ],
)
def test_what_cannot_run_without_values(loss: Any, said: str) -> None:
    """The reason names the operation, and no collective is begun."""
    with pytest.raises(Exception) as e:  # noqa: PT011 - whatever torch raises
        fake(1, loss)
    assert explain_uncounted(e.value) == said
