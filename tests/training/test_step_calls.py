"""Function calls of a step on the benchmark's tiny model, which are the same on any machine."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

from benchmarks.timing import count_calls
from benchmarks.tiny import CONFIG, MLP, by_hand
from tests.support.running import running
from unipar.engines.gradients import clip_alike

STEP_CALLS = 42
"""Calls of a step beyond those of forward, backward, clip and update alone."""

DATA_CALLS = 22
"""Further calls of a step that reads its own data, beyond those of the dataset and of collate."""

COMPREHENSIONS = 8 if sys.version_info < (3, 12) else 0
"""Comprehensions of the data's way, which are calls in older versions of Python."""


def test_calls_of_a_step(tmp_path: Path) -> None:
    """A feature that adds a call to every step, or to the reading of every step's data, changes these numbers."""
    task = MLP()
    dataset, model = task.data(), task.model()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    parameters = tuple(model.parameters())

    def read() -> tuple[object, ...]:
        return task.collate([dataset[0], dataset[1], dataset[2], dataset[3]])

    def step_alone() -> None:
        task.loss(model, batch).backward()
        clip_alike([p.grad for p in parameters if p.grad is not None], 1.0)
        optimizer.step()
        for p in parameters:
            p.grad = None

    with running(MLP(), tmp_path, **CONFIG.model_dump(mode="json", exclude_unset=True)) as run:
        assert isinstance(run.loader.source.dataset, TensorDataset)
        data = run.batches()
        local_batch = next(data)
        batch = local_batch[0]

        def step_again() -> None:
            run.step(local_batch)
            run.done -= 1

        run.step(local_batch)
        loops = {
            "step": step_again,
            "step and data": lambda: run.step(next(data)),
            "alone": step_alone,
            "by hand, with a schedule": by_hand(lambda: batch),
            "read": read,
        }
        for loop in loops.values():
            loop()
        once, again = ({name: count_calls(loop) for name, loop in loops.items()} for _ in range(2))
    assert once == again
    calls = (once["step"] - once["alone"], once["step and data"] - once["step"] - once["read"])
    assert calls == (STEP_CALLS, DATA_CALLS + COMPREHENSIONS)
    assert once["step"] < once["by hand, with a schedule"]
