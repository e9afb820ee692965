"""`run.whole` in one process: what it gives, and where it is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typing_extensions import override

from tests.support.running import Line, running
from unipar.errors import TaskError
from unipar.run_folder.layout import run_log_path
from unipar.run_folder.run_log import RunLog
from unipar.training.evaluating.whole_model import check_room
from unipar.training.training_run import TrainingRun


def test_the_model_is_the_users_in_evaluation_mode(tmp_path: Path) -> None:
    """Its own mode is put back; the run log has the bytes, none where nothing is split."""
    with running(Line(), tmp_path) as run:
        run.step(next(run.batches()))
        with run.whole() as model:
            assert isinstance(model, nn.Linear)
            assert not model.training
            assert not torch.is_grad_enabled()
            assert float(model(torch.ones(1, 1))) == model.weight.item()
        assert model.training
    (row,) = [row for row in RunLog.read(run_log_path(tmp_path, 0)) if row["event"] == "whole"]
    assert (row["step"], row["bytes"]) == (1, 0)


_INSIDE = " was called inside `with run.whole()`, where parameters are gathered: leave the block first"


def test_nothing_else_runs_inside(tmp_path: Path) -> None:
    """A step would update parameters that are not the gathered ones."""
    with running(Line(), tmp_path) as run:
        local_batches = run.batches()
        local_batch = next(local_batches)
        calls: dict[str, Any] = {
            "run.step()": lambda: run.step(local_batch),
            "run.evaluate()": run.evaluate,
            "run.save()": run.save,
            "run.averaged()": lambda: run.averaged().__enter__(),
            "run.whole()": lambda: run.whole().__enter__(),
        }
        for name, call in calls.items():
            with run.whole(), pytest.raises(TaskError) as e:
                call()
            assert str(e.value) == name + _INSIDE
        run.step(local_batch)
        with run.whole(), pytest.raises(TaskError) as e:
            next(local_batches)
        assert str(e.value) == "the next local batch of run.batches() or run.over()" + _INSIDE


class Reaching(Line):
    """A loss that gathers the model."""

    def __init__(self) -> None:
        self.run: TrainingRun

    @override
    def loss(self, model: Any, batch: Any) -> Any:
        with self.run.whole():
            return super().loss(model, batch)


def test_it_is_refused_inside_a_step_and_for_unknown_parts(tmp_path: Path) -> None:
    """Ranks may be at different microbatches there."""
    task = Reaching()
    with running(task, tmp_path) as run:
        task.run = run
        for call in (lambda: run.step(next(run.batches())), run.evaluate):
            with pytest.raises(TaskError) as e:
                call()
            assert str(e.value) == "run.whole() was called inside a step or an evaluation: call it between two steps"
        with pytest.raises(TaskError) as e, run.whole("critic"):
            pass
        assert str(e.value) == "there is no part 'critic'; name one of model"


def test_room_is_compared_on_all_ranks() -> None:
    """The rank that has too little says its own numbers, the others those of the first such rank."""
    gib = 2**30
    check_room([gib, gib], [gib, 2 * gib], rank=0, device="cuda:0")
    for rank in range(3):
        with pytest.raises(TaskError) as e:
            check_room([3 * gib, gib, 3 * gib], [4 * gib, gib // 2, gib], rank=rank, device="cuda:0")
        needed, where, free = ("3.0 GiB", 2, "1.0 GiB") if rank == 2 else ("1.0 GiB", 1, "512 MiB")
        assert str(e.value) == (
            f"run.whole(): the parameters of the whole model take {needed} besides what rank {where} holds, and {free} "
            "are free there (cuda:0); evaluate by metrics(), which runs the split model, or generate elsewhere from "
            "the weights that `unipar checkpoint export` writes"
        )
