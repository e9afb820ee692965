"""Saves in training: states that are not published, ranks that fail together, and what counts as the best."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from tests.support.running import Line, running
from unipar.backend import Piece, Region
from unipar.checkpoint.overview.listing import checkpoint_table, list_checkpoints
from unipar.checkpoint.protocol.retention import Retention
from unipar.checkpoint.protocol.verifying import find_checkpoints, inspect_checkpoint
from unipar.checkpoint.saving import CheckpointSaver, GatheredState
from unipar.errors import CheckpointError, NonFinite, TaskError
from unipar.run_folder.layout import run_log_path
from unipar.run_folder.run_log import RunLog

SGD = {"name": "sgd", "lr": 1e-3}


def trained(folder: Path, task: Line, **sections: Any) -> None:
    folder.mkdir(exist_ok=True)
    with running(task, folder, **sections) as run:
        run.train()


def steps_saved(run: Path) -> list[int]:
    return [found.step for found in find_checkpoints(run / "checkpoints")]


class Root(Line):
    """A loss that is finite, and whose gradient at the third step is not: a root at 0."""

    def __init__(self) -> None:
        self.calls = 0

    @override
    def loss(self, model: Any, batch: Any) -> Any:
        self.calls += 1
        zero = (model.weight * 0.0).abs().sum()
        return super().loss(model, batch) + (zero.sqrt() if self.calls == 3 else 0.0)


@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_gradient_that_is_not_finite(tmp_path: Path, clip: float | None) -> None:
    """The loss of the step was finite, its gradient was not: the run ends, and the checkpoint before stays."""
    train = {"steps": 3, "optimizer": SGD, "clip": clip}
    with pytest.raises(NonFinite) as caught:
        trained(tmp_path / "run", Root(), train=train, batch={"total": 4}, checkpoint={"every": 1, "keep": 1})
    assert str(caught.value) == (
        "the norm of gradients is not finite at step 3, so the weights stay as they were before it: look at the loss's "
        "gradient (a root or a logarithm at 0), the rate (train.optimizer.lr) and the clip (train.clip), or leave such "
        "updates out (train.nonfinite: skip)"
    )
    assert steps_saved(tmp_path / "run") == [2]


class Keeps(torch.optim.SGD):
    """An optimizer with a tensor of its own, called as it is told."""

    def __init__(self, groups: Any, key: str) -> None:
        super().__init__(groups, lr=1e-3)
        self.key = key

    @override
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].setdefault(self.key, torch.tensor(3.0))
        return super().step(closure)


@pytest.mark.parametrize("key", ["weight", "buffer"])
def test_a_state_that_is_called_as_another_kind_is_refused(tmp_path: Path, key: str) -> None:
    """Such a state would be taken for the parameter, or for a buffer."""

    class Own(Line):
        @override
        def optimizer(self, groups: Any) -> Any:
            return Keeps(groups, key)

    with pytest.raises(CheckpointError) as caught:
        trained(tmp_path / "run", Own(), train={"steps": 1}, checkpoint={"every": 1})
    assert str(caught.value) == (
        f"checkpoint of step 1 in {tmp_path}/run/checkpoints: rank 0: the optimizer keeps a tensor of weight as "
        f"{key!r}, and a checkpoint calls something else so: keep it under another key; nothing was written"
    )


class Rank:
    """Part of a world that a saver needs."""

    device = torch.device("cpu")
    tree = None

    def __init__(self, rank: int, size: int, store: Any) -> None:
        self.rank, self.size, self.store = rank, size, store

    def key(self, name: str) -> str:
        return name


def test_ranks_fail_together_before_anything_is_written(tmp_path: Path) -> None:
    """One rank alone has a tensor that no checkpoint can hold: both say so, and neither waits for the other."""
    store, said = dist.HashStore(), dict[int, str]()

    def save(rank: int) -> None:
        def pieces() -> Iterator[Piece]:
            yield Piece("w", "weight", (2,), Region(rank, 1), torch.zeros(1))
            if rank == 0:
                yield Piece("table", "buffer", (1,), Region(0, 1), torch.zeros(1, dtype=torch.complex128))

        def gather() -> GatheredState:
            return pieces(), {}

        world: Any = Rank(rank, 2, store)
        saver = CheckpointSaver(tmp_path / "checkpoints", world, asynchronous=False)
        try:
            saver.save(7, gather, Retention())
        except CheckpointError as e:
            said[rank] = str(e)

    threads = [threading.Thread(target=save, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
    assert said[0] == said[1]
    assert said[0].startswith(f"checkpoint of step 7 in {tmp_path}/checkpoints: rank 0: buffer of table is of torch.")
    assert said[0].endswith("complex128, which the shards of a checkpoint cannot hold; nothing was written")
    assert list(tmp_path.iterdir()) == []


class Judged(Line):
    """A task whose evaluations give what they are told."""

    def __init__(self, values: Mapping[int, float]) -> None:
        self.values, self.evaluations = values, 0

    @override
    def metrics(self, model: Any, batch: Any) -> Mapping[str, Tensor]:
        return {"score": torch.tensor(self.values[self.evaluations])}

    @override
    def train(self, run: Any) -> None:
        for local_batch in run.batches():
            run.step(local_batch)
            if run.done % 2 == 0:
                self.evaluations = run.done
                run.evaluate()


BEST = {"metric": "score", "mode": "max", "keep": 1}


def test_the_best_are_those_of_this_folder(tmp_path: Path) -> None:
    """A run that goes on elsewhere, from a path, protects its own best and not one that is not there."""
    section = {"every": 2, "keep": 1, "best": BEST}
    trained(
        tmp_path / "a", Judged({2: 9.0, 4: 1.0}), train={"steps": 4, "optimizer": SGD}, eval={"every": None},
        checkpoint=section,
    )  # fmt: skip
    assert steps_saved(tmp_path / "a") == [4, 2]
    start = str(tmp_path / "a" / "checkpoints" / "step-00000004")
    more = {"train": {"steps": 8, "optimizer": SGD}, "checkpoint": section, "resume": start}
    trained(tmp_path / "b", Judged({6: 5.0, 8: 2.0}), **more)
    assert steps_saved(tmp_path / "b") == [8, 6]
    state = inspect_checkpoint(tmp_path / "b" / "checkpoints" / "step-00000008").state
    assert (state["best"], state["evaluated"]) == ([[6, 5.0]], 8)


def test_a_metric_that_is_not_there_ends_a_run_whose_state_is_saved(tmp_path: Path) -> None:
    """What was trained until the evaluation is not lost."""
    section = {"every": None, "best": {"metric": "accuracy"}}
    with pytest.raises(TaskError, match="the evaluation has no 'accuracy'; it has score"):
        trained(tmp_path / "run", Judged({2: 1.0}), train={"steps": 4, "optimizer": SGD}, checkpoint=section)
    assert steps_saved(tmp_path / "run") == [2]


def test_without_an_evaluation_the_best_is_told_to_have_no_effect(tmp_path: Path) -> None:
    """In a line at the run's end."""
    trained(tmp_path / "run", Line(), train={"steps": 2, "optimizer": SGD}, checkpoint={"best": BEST})
    notes = [row["said"] for row in RunLog.read(run_log_path(tmp_path / "run", 0)) if row["event"] == "read on"]
    assert notes == ["nothing was evaluated, so checkpoint.best had no effect: set eval.every"]


def test_metrics_of_an_earlier_step_are_told_to_be(tmp_path: Path) -> None:
    """The list names the step of the evaluation, if it is not the checkpoint's own."""
    section = {"every": 1, "keep": 9}
    trained(tmp_path / "run", Judged({2: 0.5}), train={"steps": 3, "optimizer": SGD}, checkpoint=section)
    table = checkpoint_table(list_checkpoints(tmp_path / "run"), 100)
    lines = [line.split("score", 1)[-1] for line in table.splitlines()[1:]]
    assert lines[0] == " 0.5 (of step 2)"
    assert lines[1] == " 0.5 (of step 2)" or lines[1] == " 0.5"
