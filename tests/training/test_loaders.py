"""Loops that bring their own loaders, one after another, across checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from tests.support.running import Line, running
from unipar.checkpoint.protocol.verifying import inspect_checkpoint
from unipar.errors import CheckpointError

SECOND_FROM = 4
"""Steps after which the loop takes its second loader."""


def loader(samples: int, first: float) -> DataLoader[Any]:
    x = torch.arange(first, first + samples)[:, None]
    return DataLoader(TensorDataset(x, 2 * x), batch_size=4)


class Phases(Line):
    """Loop that trains on 8 samples, then on 20 others, while data() has 10; it keeps what each step has read."""

    guarded = True
    """Whether the loop leaves out the first loader where a checkpoint was saved in the second."""

    def __init__(self) -> None:
        self.seen: list[list[float]] = []

    def take(self, run: Any, local_batch: Any) -> None:
        run.step(local_batch)
        self.seen.append([x for micro in local_batch.micros for x in micro.batch[0].flatten().tolist()])

    @override
    def train(self, run: Any) -> None:
        if not self.guarded or run.done < SECOND_FROM:
            for local_batch in run.over(loader(8, 1.0)):
                self.take(run, local_batch)
                if run.done >= SECOND_FROM:
                    break
        for local_batch in run.over(loader(20, 100.0)):
            self.take(run, local_batch)


class Unguarded(Phases):
    guarded = False


class Again(Phases):
    """Loop that makes a loader of the same samples anew for every second step."""

    samples = loader(10, 1.0).dataset

    @override
    def train(self, run: Any) -> None:
        while run.done < run.steps:
            for local_batch in run.over(DataLoader(self.samples, batch_size=run.config.batch.total)):
                self.take(run, local_batch)
                if run.done % 2 == 0:
                    break


def play(folder: Path, task: Phases, **sections: Any) -> list[list[float]]:
    folder.mkdir()
    train = {"steps": 8, "optimizer": {"name": "sgd", "lr": 1e-6}}
    with running(task, folder, **{"train": train, "data": {"shuffle": True}} | sections) as run:
        task.train(run)
    return task.seen


@pytest.mark.parametrize(
    ("at", "place"),
    [
        (2, {"epoch": 1, "sample": 0, "length": 8, "loader": True}),
        (6, {"epoch": 1, "sample": 4, "length": 20, "loader": True}),
    ],
)
def test_only_the_loader_of_the_checkpoint_is_placed(tmp_path: Path, at: int, place: dict[str, Any]) -> None:
    """Saved in the first loader or in the second, of other lengths than data(): the same samples at each step."""
    whole = play(tmp_path / "whole", Phases(), checkpoint={"every": at, "keep": 9})
    path = tmp_path / f"whole/checkpoints/step-{at:08d}"
    assert inspect_checkpoint(path).state["data"] == place
    assert play(tmp_path / "again", Phases(), resume=str(path)) == whole[at:]


def test_the_first_loader_is_the_one_of_the_checkpoint(tmp_path: Path) -> None:
    """A loop that begins with another one is told so before a step."""
    play(tmp_path / "whole", Unguarded(), checkpoint={"every": 6})
    path, task = tmp_path / "whole/checkpoints/step-00000006", Unguarded()
    with pytest.raises(CheckpointError) as caught:
        play(tmp_path / "again", task, resume=str(path))
    assert str(caught.value) == (
        f"checkpoint {path}: the loader of run.over() had 20 samples and has 8 samples now: the order of samples would "
        "be another; go on with the same data, with the loader that was being read then as the first (run.done tells), "
        "or begin a run with these weights (model.weights)"
    )
    assert task.seen == []


def test_a_loader_that_is_brought_again_goes_on(tmp_path: Path) -> None:
    """With another batch.total, too: each sample of the epoch once, although the loop makes its loader anew."""
    first = play(tmp_path / "first", Again(), train={"steps": 1}, checkpoint={})
    path = tmp_path / "first/checkpoints/step-00000001"
    sizes = {"batch": {"total": 2, "micro": 2}, "train": {"steps": 4}}
    again = play(tmp_path / "again", Again(), resume=str(path), **sizes)
    assert sorted(x for batch in (*first, *again) for x in batch) == [float(x) for x in range(1, 11)]
