"""A run that saves, and one that goes on from what it saved: the same steps, or a sentence why not."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from typing_extensions import override

import tests.support.running
from tests.support.running import Line, running
from unipar.checkpoint.protocol.verifying import find_checkpoints, inspect_checkpoint
from unipar.errors import CheckpointError, NonFinite, TaskError, UniparError
from unipar.run_folder.layout import run_log_path
from unipar.run_folder.run_log import RunLog
from unipar.training.training_run import TrainingRun
from unipar.utils.git import git_revision

ADAMW = {"name": "adamw", "lr": 0.1}


class Counted(Line):
    """Line with two layers, dropout, a buffer, and a state of its own."""

    def __init__(self) -> None:
        self.seen = torch.zeros(2)
        self.log: list[Any] = []

    @override
    def model(self) -> Any:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))

    @override
    def state(self) -> Any:
        return {"seen": self.seen, "log": self.log, "nothing": None}

    @override
    def load_state(self, state: Any) -> None:
        self.seen, self.log = state["seen"], state["log"]

    @override
    def train(self, run: Any) -> None:
        for local_batch in run.batches():
            outcome = run.step(local_batch)
            self.seen = self.seen + 1
            self.log.append([outcome.step, outcome.loss])


def trained(folder: Path, task: Any = None, **sections: Any) -> TrainingRun:
    folder.mkdir(exist_ok=True)
    with running(task or Counted(), folder, **sections) as run:
        run.task.train(run)
    return run


def settings(steps: int = 9, **more: Any) -> dict[str, Any]:
    return {
        "train": {"steps": steps, "optimizer": ADAMW, "seed": 5},
        "eval": {"every": 4},
        "batch": {"total": 4},
        **more,
    }


def rows(folder: Path, event: str) -> list[dict[str, Any]]:
    return [row for row in RunLog.read(run_log_path(folder, 0)) if row["event"] == event]


def weights(run: TrainingRun) -> dict[Any, Any]:
    return {(p.name, p.kind): p.tensor.detach().clone() for p in run.pieces()}


@pytest.mark.parametrize(
    ("at", "asynchronous"),
    [
        *((3, True), (4, False), (6, True)),
        *(pytest.param(*more, marks=pytest.mark.sweep) for more in ((3, False), (4, True), (6, False))),
    ],
)
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path, at: int, asynchronous: bool) -> None:
    """Losses, evaluations, moments, buffers, the task's own state: bit for bit, logged at the same steps."""
    whole = trained(tmp_path / "whole", **settings())
    keeps = {"every": at, "keep": 9, "async": asynchronous}
    trained(tmp_path / "first", **settings(checkpoint=keeps))
    path = tmp_path / "first" / "checkpoints" / f"step-{at:08d}"
    again = trained(tmp_path / "again", **settings(resume=str(path)))
    assert again.resumed
    assert not whole.resumed
    before, after = weights(whole), weights(again)
    assert before.keys() == after.keys()
    assert all(torch.equal(t, after[key]) for key, t in before.items())
    for event in ("step", "eval"):
        keep = ("step", "loss", "norm", "lr", "samples")
        kept = [{k: row.get(k) for k in keep} for row in rows(tmp_path / "whole", event) if row["step"] > at]
        assert [{k: row.get(k) for k in keep} for row in rows(tmp_path / "again", event)] == kept
    assert [row["step"] for row in rows(tmp_path / "again", "step")] == [n for n in (1, 3, 5, 7, 9) if n > at]
    old, new = whole.task, again.task
    assert isinstance(old, Counted)
    assert isinstance(new, Counted)
    assert torch.equal(old.seen, new.seen)
    assert old.log == new.log


def test_what_is_saved_and_what_is_kept(tmp_path: Path) -> None:
    """Every third step and at the end; the two newest stay, and the one with the best evaluation."""
    best = {"metric": "loss", "mode": "max", "keep": 1}
    run = trained(tmp_path / "run", **settings(11, checkpoint={"every": 3, "keep": 2, "best": best}))
    assert [row["step"] for row in rows(tmp_path / "run", "checkpoint")][-1] == 11
    evals = {row["step"]: row["loss"] for row in rows(tmp_path / "run", "eval")}
    assert set(evals) == {4, 8}
    top = max(evals, key=lambda step: evals[step])
    found = [c.step for c in find_checkpoints(tmp_path / "run" / "checkpoints")]
    assert found == sorted({11, 9, top}, reverse=True)
    state = inspect_checkpoint(tmp_path / "run" / "checkpoints" / "step-00000011").state
    assert state["step"] == 11
    assert state["data"] == {"epoch": 3, "sample": 8, "length": 10}
    assert state["best"] == [[top, evals[top]]]
    assert state["ranks"] == 1
    assert state["config"]["train"]["seed"] == 5
    (group,) = state["parts"]["model"]["groups"]
    assert group["settings"]["betas"] == [0.9, 0.999]
    assert group["changed"] == []
    assert run.done == 11


def test_nothing_is_saved_without_the_section(tmp_path: Path) -> None:
    """A run without `checkpoint` writes no state, and run.save() says why."""
    run = trained(tmp_path / "run", **settings())
    assert not (tmp_path / "run" / "checkpoints").exists()
    with pytest.raises(TaskError) as caught:
        run.save()
    assert str(caught.value) == "run.save() needs the config's section checkpoint, which says where and what is kept"


def test_a_loop_saves_when_it_likes(tmp_path: Path) -> None:
    """run.save() between two steps saves that step; within a local batch it is refused."""

    class Saves(Line):
        @override
        def train(self, run: Any) -> None:
            for local_batch in run.batches():
                run.step(local_batch)
                if run.done == 2:
                    run.save()

    trained(tmp_path / "run", Saves(), checkpoint={"every": None, "keep": 9})
    assert [c.step for c in find_checkpoints(tmp_path / "run" / "checkpoints")] == [3, 2]


def test_samples_are_read_once_in_an_epoch_with_another_batch(tmp_path: Path) -> None:
    """Batches of 4 then of 2: what is left of the epoch's 10 samples comes once, in the epoch's own order."""

    class Sees(Line):
        def __init__(self) -> None:
            self.seen: list[list[float]] = []

        @override
        def train(self, run: Any) -> None:
            for local_batch in run.batches():
                run.step(local_batch)
                self.seen.append([x for micro in local_batch.micros for x in micro.batch[0].flatten().tolist()])

    first, again = Sees(), Sees()
    train = {"optimizer": {"name": "sgd", "lr": 1e-3}}
    trained(tmp_path / "first", first, train={"steps": 2, **train}, checkpoint={})
    path = tmp_path / "first" / "checkpoints" / "step-00000002"
    trained(tmp_path / "again", again, train={"epochs": 2, **train}, batch={"total": 2, "micro": 2}, resume=str(path))
    left = sorted(x for batch in again.seen[:1] for x in batch)
    assert sorted([x for batch in first.seen for x in batch] + left) == [float(i) for i in range(1, 11)]
    assert [len(batch) for batch in again.seen] == [2] * 6


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"train": {"steps": 9, "optimizer": ADAMW, "seed": 6}},
         "checkpoint {}: train.seed was 5 and is 6: going on would train something else; take the old value back, or "
         "say the new one again with --set train.seed=6"),
        ({"train": {"steps": 9, "optimizer": {"name": "sgd", "lr": 0.1}, "seed": 5}},
         "checkpoint {}: train.optimizer.name was 'adamw' and is 'sgd': going on would train something else; take the "
         "old value back, or say the new one again with --set train.optimizer.name='sgd'"),
        ({"train": {"steps": 4, "optimizer": ADAMW, "seed": 5}},
         "checkpoint {} has done 4 steps, and the run has 4: nothing is left to do; give it more (--set "
         "train.steps=...)"),
        ({"data": {"shuffle": False, "last_batch": "drop"}},
         "checkpoint {}: data.shuffle was true and is false (also data.last_batch): going on would train something "
         "else; take the old value back, or say the new one again with --set data.shuffle=false"),
    ],
)  # fmt: skip
def test_another_run_is_refused(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    """Each key that would make it another run is named with both values, before any step."""
    trained(tmp_path / "first", **settings(4, checkpoint={"every": 4}))
    path = tmp_path / "first" / "checkpoints" / "step-00000004"
    with pytest.raises(CheckpointError) as caught:
        trained(tmp_path / "again", **settings(resume=str(path)) | changes)
    assert str(caught.value) == sentence.format(path)
    assert rows(tmp_path / "again", "step") == []


class Wider(Counted):
    @override
    def model(self) -> Any:
        return nn.Sequential(nn.Linear(1, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 1))


class Deeper(Counted):
    @override
    def model(self) -> Any:
        return nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1), nn.Linear(1, 1))


class Shallow(Counted):
    @override
    def model(self) -> Any:
        return nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4))


class Longer(Counted):
    @override
    def data(self) -> Any:
        x = torch.arange(1.0, 12.0)[:, None]
        return TensorDataset(x, 2 * x)


class Forgetful(Line):
    @override
    def model(self) -> Any:
        return Counted().model()


@pytest.mark.parametrize(
    ("task", "sentence"),
    [
        (Wider, "checkpoint {}: 0.bias (weight) has the shape [4], in the model [5]"),
        (Deeper, "checkpoint {} lacks 4.bias, 4.weight, which the model has: it is of another model"),
        (Shallow, "checkpoint {} has 3.bias, 3.weight, which the model lacks: it is of another model"),
        (Longer, "checkpoint {}: data() had 10 samples and has 11 samples now: the order of samples would be another; "
         "go on with the same data, or begin a run with these weights (model.weights)"),
        (Forgetful, "the checkpoint holds a state() of the task, and this task has no load_state(state)"),
    ],
)  # fmt: skip
def test_another_task_is_refused(tmp_path: Path, task: Any, sentence: str) -> None:
    """What does not fit is named: the tensor with both shapes or dtypes, the data with both lengths."""
    trained(tmp_path / "first", **settings(4, checkpoint={"every": 4}))
    path = tmp_path / "first" / "checkpoints" / "step-00000004"
    with pytest.raises(UniparError) as caught:
        trained(tmp_path / "again", task(), **settings(resume=str(path)))
    assert str(caught.value) == sentence.format(path)


def test_the_newest_whole_checkpoint_is_taken(tmp_path: Path) -> None:
    """A newer one whose bytes have changed is passed over, and the run log says so; a path names exactly one."""
    trained(tmp_path / "run", **settings(6, checkpoint={"every": 2}))
    newest = tmp_path / "run" / "checkpoints" / "step-00000006"
    shard = newest / "shards" / "rank-00000.safetensors"
    data = bytearray(shard.read_bytes())
    data[-5] ^= 1
    shard.write_bytes(data)
    broken = f"{shard}: its hash is not the one in manifest.json; its bytes changed"
    trained(tmp_path / "run", **settings(8, checkpoint={"every": 2}, resume="auto"))
    (row,) = rows(tmp_path / "run", "resumed")
    assert row["step"] == 4
    assert row["passed"] == [broken]
    assert [r["step"] for r in rows(tmp_path / "run", "step")] == [1, 3, 5, 7, 8]
    data[-5] ^= 2
    shard.write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        trained(tmp_path / "again", **settings(8, resume=str(newest)))
    assert "its bytes changed" in str(caught.value) or "step-00000006" in str(caught.value)


def test_the_start_is_taken_where_all_own_checkpoints_are_broken(tmp_path: Path) -> None:
    """A second attempt of a run that began from a path goes back to it; if that is broken as well, all is told."""
    trained(tmp_path / "first", **settings(2, checkpoint={"every": 2}))
    start, run = tmp_path / "first/checkpoints/step-00000002", tmp_path / "run"
    trained(run, **settings(4, checkpoint={}, resume=str(start)))
    (run / "attempts.jsonl").write_text("{}\n", "utf-8")
    broken = run / "checkpoints/step-00000004/manifest.sha256"
    broken.unlink()
    trained(run, **settings(4, checkpoint={}, resume=str(start)))
    (row,) = rows(run, "resumed")
    missing = f"{broken}: cannot be opened (No such file or directory)"
    assert (row["step"], row["path"], row["passed"]) == (2, str(start), [missing])
    broken.unlink()
    (start / "state.json").unlink()
    with pytest.raises(CheckpointError) as caught:
        trained(run, **settings(4, checkpoint={}, resume=str(start)))
    assert str(caught.value) == (
        f"{start / 'state.json'}: missing, though manifest.json lists it; {missing}; "
        f"`unipar checkpoint list {start.parent}` shows the others"
    )


def test_a_run_whose_end_was_not_written_only_ends(tmp_path: Path) -> None:
    """The run was killed between its last save and its end: no step is taken again, and it is no error."""
    trained(tmp_path / "run", **settings(4, checkpoint={}))
    before = rows(tmp_path / "run", "step")
    RunLog.trim(run_log_path(tmp_path / "run", 0), 4)
    assert rows(tmp_path / "run", "end") == []
    trained(tmp_path / "run", **settings(4, checkpoint={}, resume="auto"))
    assert [row["steps"] for row in rows(tmp_path / "run", "end")] == [4]
    assert rows(tmp_path / "run", "step") == before


def test_a_state_behind_a_bad_loss_is_not_published(tmp_path: Path) -> None:
    """A loss that became NaN since the last logged step ends the run before the state is saved."""

    class Breaks(Line):
        @override
        def loss(self, model: Any, batch: Any) -> Any:
            return super().loss(model, batch) * (math.nan if model.weight.item() > 0.2 else 1.0)

    train = {"steps": 20, "optimizer": {"name": "sgd", "lr": 1e-3}}
    with pytest.raises(NonFinite):
        trained(tmp_path / "run", Breaks(), train=train, checkpoint={"every": 1}, log={"every": 100})
    last = find_checkpoints(tmp_path / "run" / "checkpoints")[0]
    with running(Breaks(), tmp_path / "run", train=train, resume=str(last.path)) as run:
        assert run.engine is not None
        (value,) = [p.tensor.item() for p in run.pieces() if p.kind == "weight"]
        assert math.isfinite(value)
        run.done = run.steps


def test_an_unknown_metric_is_named(tmp_path: Path) -> None:
    """`best` by a metric that the evaluation does not have is an error at the first evaluation."""
    with pytest.raises(TaskError) as caught:
        trained(tmp_path / "run", **settings(checkpoint={"best": {"metric": "accuracy"}}))
    assert str(caught.value) == "checkpoint.best.metric: the evaluation has no 'accuracy'; it has loss"


class Blocks(Counted):
    """A task that puts a file in the way of the folder for checkpoints, once the first step is done."""

    def __init__(self, place: Path) -> None:
        super().__init__()
        self._place = place

    @override
    def train(self, run: Any) -> None:
        for local_batch in run.batches():
            run.step(local_batch)
            if run.done == 1:
                self._place.rmdir()
                self._place.write_text("a file")


@pytest.mark.parametrize(("on_error", "failed", "steps"), [("stop", [], 4), ("warn", [4, 8, 9], 9)])
def test_a_save_that_fails_stops_the_run_or_is_told(
    tmp_path: Path, on_error: str, failed: list[int], steps: int
) -> None:
    """`on_error` decides; the folder that is in the way is named either way."""
    place = tmp_path / "in-the-way"
    keeps = {"every": 4, "to": str(place), "on_error": on_error, "async": False}
    if on_error == "stop":
        with pytest.raises(CheckpointError, match=r"checkpoint of step 4 in .*in-the-way"):
            trained(tmp_path / "run", Blocks(place), **settings(checkpoint=keeps))
    else:
        trained(tmp_path / "run", Blocks(place), **settings(checkpoint=keeps))
    told = rows(tmp_path / "run", "checkpoint failed")
    assert [row["step"] for row in told] == failed
    assert all("in-the-way" in row["said"] for row in told)
    assert max(row["step"] for row in rows(tmp_path / "run", "step")) <= steps


def test_the_folder_is_checked_before_the_first_step(tmp_path: Path) -> None:
    """A folder that cannot be written is told at once; with `on_error: warn` training goes on."""
    place = tmp_path / "in-the-way"
    place.write_text("a file")
    with pytest.raises(CheckpointError) as refused:
        trained(tmp_path / "stop", **settings(checkpoint={"to": str(place)}))
    assert str(refused.value) == f"no checkpoint can be saved in {place}: rank 0: {place}: File exists"
    assert rows(tmp_path / "stop", "step") == []
    trained(tmp_path / "warn", **settings(checkpoint={"to": str(place), "on_error": "warn"}))
    assert [row["step"] for row in rows(tmp_path / "warn", "checkpoint failed")] == [0, 9]


def test_the_state_names_the_revision_of_the_code(tmp_path: Path) -> None:
    """The revision is that of the folder in which the loss is written."""
    trained(tmp_path / "run", train={"steps": 1, "optimizer": ADAMW}, checkpoint={"every": 1})
    (found,) = find_checkpoints(tmp_path / "run" / "checkpoints")
    revision = inspect_checkpoint(found.path).state["git"]
    assert revision == git_revision(Path(tests.support.running.__file__).parent)
