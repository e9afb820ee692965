"""Streams across checkpoints: put back by their own state, or read on; losses are those of the unbroken run."""

from __future__ import annotations

import random
from functools import partial
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from typing_extensions import override

from tests.support.run_logs import rows_of, step_losses
from tests.support.running import Line, running
from tests.support.stateful_streams import OnIterator, Plain, Stateful
from unipar.checkpoint.protocol.verifying import inspect_checkpoint
from unipar.errors import CheckpointError, TaskError
from unipar.run_folder.heartbeat import HeartbeatWriter
from unipar.training.training_run import TrainingRun

STEPS = 9


class Reads(Line):
    """A line through what a stream gives; it keeps the samples of each step."""

    def __init__(self, data: Any) -> None:
        self.given, self.seen = data, list[list[float]]()

    @override
    def data(self) -> Any:
        return self.given

    @override
    def validation(self) -> Any:
        return Plain(5)

    @override
    def train(self, run: Any) -> None:
        for local_batch in run.batches():
            run.step(local_batch)
            self.seen.append([x for m in local_batch.micros if m.scale for x in m.batch[0].flatten().tolist()])


def train(folder: Path, given: Any, steps: int = STEPS, **sections: Any) -> TrainingRun:
    folder.mkdir(exist_ok=True, parents=True)
    made = {"log": {"every": 1}, "train": {"steps": steps, "optimizer": {"name": "adamw", "lr": 0.1}}}
    with running(Reads(given), folder, **made | sections) as run:
        run.task.train(run)
    return run


def seen(run: TrainingRun) -> list[list[float]]:
    assert isinstance(run.task, Reads)
    return run.task.seen


def said(folder: Path) -> list[str]:
    return [row["said"] for row in rows_of(folder, "data", "read on")]


KINDS = (Plain, Stateful, OnIterator)


def _played(cases: list[tuple[Any, ...]], always: set[tuple[Any, ...]]) -> list[Any]:
    """Return cases as parameters; those that are not in `always` are left to the sweeps."""
    return [case if case in always else pytest.param(*case, marks=pytest.mark.sweep) for case in cases]


@pytest.mark.parametrize(
    ("kind", "workers", "at"),
    _played(
        list(product(KINDS, (0, 2), (2, 4, 5))),
        {(Plain, 0, 2), (Plain, 2, 5), (Stateful, 0, 4), (Stateful, 0, 5), (Stateful, 2, 2), (OnIterator, 0, 2)},
    ),
)
def test_a_stream_goes_on_where_it_was(tmp_path: Path, kind: type[Plain], workers: int, at: int) -> None:
    """Within an epoch, at its last full batch and at its end; with data workers that read ahead and without."""
    data = {"workers": workers}
    whole = train(tmp_path / "whole", kind(), data=data)
    train(tmp_path / "first", kind(), data=data, checkpoint={"every": at, "keep": 9, "async": False})
    path = tmp_path / "first" / "checkpoints" / f"step-{at:08d}"
    stream = kind()
    again = train(tmp_path / "again", stream, data=data, resume=str(path))
    assert seen(again) == seen(whole)[at:]
    assert step_losses(tmp_path / "again") == [pair for pair in step_losses(tmp_path / "whole") if pair[0] > at]
    lines = said(tmp_path / "again")
    if kind is Plain:
        if at == 2:
            assert (
                "the stream is read on to epoch 1 after 8 samples: Plain has no state_dict and load_state_dict" in lines
            )
            assert any(line.startswith("the stream was read on past 8 samples in ") for line in lines)
        assert said(tmp_path / "first")[-1] == (
            "Plain has no state_dict and load_state_dict: a run that goes on from a checkpoint reads it on"
        )
    else:
        assert not any("read on" in line for line in lines)
        assert any(line.startswith("the stream was put back to epoch ") for line in lines)
    if isinstance(stream, Stateful) and workers == 0:
        assert stream.loaded == 1
        assert stream.given == sum(map(len, seen(again)))


@pytest.mark.parametrize(("kind", "workers"), [(Plain, 0), (Stateful, 2)])
def test_another_batch_reads_the_rest_of_the_epoch(tmp_path: Path, kind: type[Plain], workers: int) -> None:
    """Batches of 4 then of 3: what is left of the epoch's 14 samples comes once, in the stream's order."""
    train(tmp_path / "first", kind(), 2, checkpoint={})
    path = tmp_path / "first" / "checkpoints" / "step-00000002"
    sections = {"batch": {"total": 3, "micro": 3}, "data": {"workers": workers}}
    again = train(tmp_path / "again", kind(), 5, resume=str(path), **sections)
    assert seen(again) == [[9, 10, 11], [12, 13, 14], [1, 2, 3]]
    assert again.position.epoch == 1


@pytest.mark.parametrize(
    ("kind", "workers", "at"),
    _played(
        list(product(KINDS, (0, 2, 3), (1, 2, 3, 4, 6))),
        {(Stateful, 0, 2), (Stateful, 2, 1), (Stateful, 3, 3), (Plain, 2, 4)},
    ),
)
def test_parts_go_on_where_they_were(tmp_path: Path, kind: type[Plain], workers: int, at: int) -> None:
    """With `shards` each data worker's part, and whose turn it is; also when some parts have ended."""
    data = {"workers": workers, "stream": "shards"}
    whole = train(tmp_path / "whole", kind(), data=data)
    train(tmp_path / "first", kind(), data=data, checkpoint={"every": at, "keep": 9, "async": False})
    path = tmp_path / "first" / "checkpoints" / f"step-{at:08d}"
    again = train(tmp_path / "again", kind(), data=data, resume=str(path))
    assert seen(again) == seen(whole)[at:]
    assert step_losses(tmp_path / "again") == [pair for pair in step_losses(tmp_path / "whole") if pair[0] > at]


def test_other_readers_are_refused_within_an_epoch(tmp_path: Path) -> None:
    """Parts of other readers have other samples; with data.stream said again the next epoch begins."""
    train(tmp_path / "first", Stateful(), 2, data={"workers": 2, "stream": "shards"}, checkpoint={})
    path = tmp_path / "first" / "checkpoints" / "step-00000002"
    with pytest.raises(CheckpointError) as caught:
        train(tmp_path / "again", Stateful(), data={"stream": "shards"}, resume=str(path))
    why = (
        f"checkpoint {path}: with data.stream: shards, 1 x 2 readers (data ranks x data workers) have read parts of "
        "the stream, and now there are 1 x 1 readers (data ranks x data workers), whose parts have other samples"
    )
    assert str(caught.value) == (
        f"{why}: the rest of epoch 1 cannot be read so that each sample comes once; go on as it was saved, or begin "
        "epoch 2 with --set data.stream=shards"
    )


def test_a_state_that_cannot_be_saved_is_named(tmp_path: Path) -> None:
    """An object in the state: the stream is read on, and a line says why; nothing is pickled."""

    class Odd(Stateful):
        @override
        def state_dict(self) -> dict[str, Any]:
            return {"at": self.at, "generator": random.Random(1)}

    whole = train(tmp_path / "whole", Odd())
    train(tmp_path / "first", Odd(), 2, checkpoint={})
    why = (
        "state_dict() of the stream: stream[0][0].generator is of type Random; return numbers, texts, lists, mappings "
        "and tensors"
    )
    assert said(tmp_path / "first")[-1] == f"{why}: a run that goes on from a checkpoint reads it on"
    again = train(tmp_path / "again", Odd(), resume=str(tmp_path / "first" / "checkpoints" / "step-00000002"))
    assert f"the stream is read on to epoch 1 after 8 samples: {why}" in said(tmp_path / "again")
    assert seen(again) == seen(whole)[2:]


def test_a_stream_that_became_shorter(tmp_path: Path) -> None:
    """Reading on past the end is an error with both numbers."""
    train(tmp_path / "first", Plain(), 2, checkpoint={})
    path = tmp_path / "first" / "checkpoints" / "step-00000002"
    with pytest.raises(TaskError) as caught:
        train(tmp_path / "again", Plain(6), resume=str(path))
    assert str(caught.value) == (
        "the stream ended after 6 samples of epoch 1, and the checkpoint was saved after 8 of them: it is another "
        "stream"
    )


def test_an_evaluation_of_the_same_stream_object(tmp_path: Path) -> None:
    """An evaluation that would move the state away from the training's place is refused."""

    class Same(Reads):
        @override
        def validation(self) -> Any:
            return self.given

    with pytest.raises(TaskError) as caught, running(Same(Stateful()), tmp_path, eval={"every": 1}) as run:
        run.task.train(run)
    assert str(caught.value) == (
        "validation() returned the same Stateful object as data(), and an evaluation would move its state_dict() away "
        "from the training's place: return another object"
    )


def test_a_script_that_brings_its_loader(tmp_path: Path) -> None:
    """run.over(loader) goes on where the loader's stream was, although data() is not there to ask."""

    class Script(Reads):
        @override
        def defines(self, name: str) -> bool:
            return name != "data" and super().defines(name)

        @override
        def data(self) -> Any:
            raise AssertionError("the script has no data()")

        @override
        def train(self, run: Any) -> None:
            for local_batch in run.over(DataLoader(self.given, batch_size=4)):
                run.step(local_batch)
                self.seen.append([x for m in local_batch.micros if m.scale for x in m.batch[0].flatten().tolist()])

    def play(folder: Path, steps: int, **sections: Any) -> list[list[float]]:
        folder.mkdir()
        task = Script(Stateful())
        with running(task, folder, train={"steps": steps}, **sections) as run:
            task.train(run)
        return task.seen

    whole = play(tmp_path / "whole", 6)
    play(tmp_path / "first", 2, checkpoint={})
    path = tmp_path / "first" / "checkpoints" / "step-00000002"
    assert play(tmp_path / "again", 6, resume=str(path)) == whole[2:]


def test_what_a_checkpoint_says_of_a_stream(tmp_path: Path) -> None:
    """state.json holds epoch, samples and readers; tensors of the state are among the checkpoint's."""
    train(tmp_path / "run", Stateful(), 2, checkpoint={})
    contents = inspect_checkpoint(tmp_path / "run" / "checkpoints" / "step-00000002")
    stream = contents.state["data"]["stream"]
    assert {key: stream[key] for key in ("read", "epoch", "sample", "workers")} == {
        "read": "whole", "epoch": 0, "sample": 8, "workers": 1
    }  # fmt: skip
    (seat,) = stream["seats"]
    assert seat["turn"] == 0
    assert [(part["read"], part["ended"], part["state"]["at"]) for part in seat["parts"]] == [(8, False, 8)]
    shapes = {name: t.shape for (name, kind), t in contents.manifest.tensors.items() if kind == "stream"}
    assert sorted(shapes.values()) == [(2,), (8,)]


def _is_whole_run(tmp_path: Path, make: Any, at: int, **sections: Any) -> list[str]:
    """Check that a run which goes on after step `at` is the unbroken one; return what it says of its data."""
    whole = train(tmp_path / "whole", make(), **sections)
    train(tmp_path / "first", make(), checkpoint={"every": at, "keep": 9, "async": False}, **sections)
    path = tmp_path / "first" / "checkpoints" / f"step-{at:08d}"
    again = train(tmp_path / "again", make(), resume=str(path), **sections)
    assert seen(again) == seen(whole)[at:]
    assert step_losses(tmp_path / "again") == [pair for pair in step_losses(tmp_path / "whole") if pair[0] > at]
    return said(tmp_path / "again")


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata 0.11 calls it
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_data_loader(tmp_path: Path, workers: int) -> None:
    """torchdata's StatefulDataLoader: its dataset's state; shuffle=True over indexed samples is as elsewhere."""
    loader = import_module("torchdata.stateful_dataloader").StatefulDataLoader

    def make() -> Any:
        return loader(Stateful(), batch_size=4, num_workers=workers)

    lines = _is_whole_run(tmp_path / "a", make, 2)
    assert "the stream was put back to epoch 1 after 8 samples" in lines
    pairs = [(torch.tensor([float(x)]), torch.tensor([2.0 * x])) for x in range(10)]
    assert not _is_whole_run(tmp_path / "b", partial(loader, pairs, batch_size=4, shuffle=True), 4)


def test_a_loader_of_nodes(tmp_path: Path) -> None:
    """torchdata's Loader over nodes keeps its place in its own state."""
    nodes: Any = import_module("torchdata.nodes")

    def pair(x: int) -> Any:
        return torch.tensor([float(x)]), torch.tensor([2.0 * x])

    def make() -> Any:
        return nodes.Loader(nodes.Mapper(nodes.IterableWrapper(range(14)), pair))

    assert "the stream was put back to epoch 1 after 8 samples" in _is_whole_run(tmp_path, make, 2)


@pytest.mark.slow  # its pyarrow starts a thread, and forks need one: `datasets` is not in the test environment
@pytest.mark.parametrize(
    ("keys", "at", "shuffled"),
    [({}, 2, False), ({"workers": 2}, 5, False), ({"stream": "shards", "workers": 2}, 2, False), ({}, 2, True)],
)
def test_a_dataset_of_hugging_face(tmp_path: Path, keys: dict[str, Any], at: int, shuffled: bool) -> None:
    """Its IterableDataset is put back; with a shuffle buffer, whose samples its state leaves out, it is read on."""
    datasets = pytest.importorskip("datasets")

    def make() -> Any:
        rows = [{"x": [float(i)], "y": [2.0 * i]} for i in range(14)]
        table = datasets.table.InMemoryTable.from_pylist(rows)
        stream = datasets.Dataset(table, fingerprint="rows").to_iterable_dataset(num_shards=7)
        stream = stream.map(half).with_format("torch")
        return stream.shuffle(seed=3, buffer_size=6) if shuffled else stream

    def half(row: dict[str, list[float]]) -> dict[str, list[float]]:
        return {"x": [row["x"][0] / 2]}

    class Named(Reads):
        @override
        def collate(self, samples: list[Any]) -> Any:
            return torch.stack([s["x"] for s in samples]), torch.stack([s["y"] for s in samples])

    def play(folder: Path, **sections: Any) -> list[list[float]]:
        folder.mkdir()
        task = Named(make())
        with running(task, folder, train={"steps": STEPS}, data=keys, **sections) as run:
            task.train(run)
        return task.seen

    whole = play(tmp_path / "whole")
    play(tmp_path / "first", checkpoint={"every": at, "keep": 9})
    path = tmp_path / "first" / "checkpoints" / f"step-{at:08d}"
    assert play(tmp_path / "again", resume=str(path)) == whole[at:]
    lines = said(tmp_path / "again")
    if shuffled:
        why = "the state of IterableDataset leaves out the samples in its shuffle buffer"
        assert f"the stream is read on to epoch 1 after 8 samples: {why}" in lines
    else:
        assert any(line.startswith("the stream was put back to epoch ") for line in lines)


def test_whoever_watches_sees_long_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saving, loading and reading on: each goes up to its whole in the heartbeat, and ends there."""
    works: list[tuple[str, int, int]] = []
    set_work = HeartbeatWriter.set_work

    def note(self: HeartbeatWriter, name: str, done: int = 0, total: int = 0) -> None:
        works.append((name, done, total))
        set_work(self, name, done, total)

    monkeypatch.setattr(HeartbeatWriter, "set_work", note)
    train(tmp_path / "first", Plain(), steps=2, checkpoint={"every": 2, "async": False})
    saved = [work for work in works if work[0] == "saving"]
    assert saved[-1][1] == saved[-1][2] > 0
    assert works[-1] == ("", 0, 0)
    works.clear()
    train(tmp_path / "again", Plain(), resume=str(tmp_path / "first" / "checkpoints" / "step-00000002"))
    for name in ("verifying the checkpoint", "loading the checkpoint"):
        found = [work for work in works if work[0] == name]
        assert found[-1][1] == found[-1][2] > 0
    at = works.index(("reading on", 8, 8))
    assert ("", 0, 0) in works[at + 1 :]
