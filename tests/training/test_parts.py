"""Several parts: what `run.step` and `run.frozen` give, what is refused, and what is written down."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from typing_extensions import override

import unipar
from tests.conformance.gan import Gan
from tests.support.running import running
from unipar.backend import Piece
from unipar.errors import ConfigError, NonFinite, TaskError, UniparError
from unipar.run_folder.layout import run_log_path
from unipar.run_folder.run_log import RunLog
from unipar.task import Run
from unipar.training.trained_parts import combine_recorded_parts
from unipar.training.training_run import TrainingRun


class Pair(unipar.Task):
    """Two lines: the first is trained as it is, the second through the first."""

    def __init__(self, train: Callable[[TrainingRun], None] | None = None, model: Any = None) -> None:
        self._train, self._model = train, model
        self.run: Run

    @override
    def model(self) -> Any:
        return self._model() if self._model else {"a": nn.Linear(1, 1, bias=False), "b": nn.Linear(1, 1, bias=False)}

    @override
    def data(self) -> Any:
        return TensorDataset(torch.arange(1.0, 9.0)[:, None])

    @override
    def loss(self, model: Any, batch: Any) -> Tensor:
        return (model(batch[0]) - 1).square().mean()

    def through(self, model: Any, batch: Any) -> Tensor:
        return (self.run.frozen("a")(_apply, model(batch[0])) - 1).square().mean()

    @override
    def validation(self) -> Any:
        return self.data()

    @override
    def train(self, run: Run) -> None:
        self.run = run
        if self._train is not None:
            assert isinstance(run, TrainingRun)
            self._train(run)
            return
        for local_batch in run.batches():
            run.step(local_batch, part="a")
            run.step(local_batch, part="b", loss=self.through)


def _apply(model: Any, x: Tensor) -> Tensor:
    return model(x)


def _refused(task: unipar.Task, folder: Path, **sections: Any) -> UniparError:
    with pytest.raises(UniparError) as e, running(task, folder, **sections) as run:
        task.train(run)
    return e.value


def _weights(pieces: Iterator[Piece]) -> dict[str, Tensor]:
    return {p.name: p.tensor.detach().clone() for p in pieces if p.kind == "weight"}


def test_the_other_part_is_left_alone(tmp_path: Path) -> None:
    """The gradient goes through the frozen part to the input; it has none itself, and learns again afterwards."""
    seen: list[tuple[bool, Any]] = []

    def train(run: TrainingRun) -> None:
        task: Any = run.task
        a: Any = run.parts["a"].module.weight
        for local_batch in run.batches():
            before = _weights(run.pieces())
            run.step(local_batch, part="b", loss=task.through)
            after = _weights(run.pieces())
            seen.append((a.requires_grad, a.grad))
            assert torch.equal(before["a.weight"], after["a.weight"])
            assert not torch.equal(before["b.weight"], after["b.weight"])

    with running(Pair(train), tmp_path) as run:
        run.task.train(run)
        assert run.done == 3
    assert seen == [(True, None)] * 3


def test_buffers_of_a_frozen_part_are_afterwards_what_they_were(tmp_path: Path) -> None:
    """BatchNorm in training mode normalises by the batch; its statistics move with its own part's steps alone."""

    def model() -> dict[str, Any]:
        return {"a": nn.BatchNorm1d(1), "b": nn.Linear(1, 1)}

    def train(run: TrainingRun) -> None:
        task: Any = run.task
        for local_batch in run.batches():
            kept = {name: b.clone() for name, b in run.parts["a"].module.named_buffers()}
            run.step(local_batch, part="b", loss=task.through)
            assert all(torch.equal(b, kept[n]) for n, b in run.parts["a"].module.named_buffers())
            assert run.parts["a"].module.training
            run.step(local_batch, part="a")
            counted: Any = run.parts["a"].module.num_batches_tracked
            assert counted == kept["num_batches_tracked"] + len(local_batch)

    with running(Pair(train, model), tmp_path) as run:
        run.task.train(run)


def test_what_is_written_down(tmp_path: Path) -> None:
    """A row a logged share: the sum of the parts' last losses, the norm of all, and each part by name."""
    sections: dict[str, Any] = {
        "train": {"steps": 4, "optimizer": {"name": "sgd", "lr": 1e-3}, "schedule": {"name": "linear"},
                  "parts": {"critic": {"optimizer": {"name": "adamw", "lr": 1e-2}}}},
        "log": {"every": 2},
    }  # fmt: skip
    with running(Gan(), tmp_path, **sections) as run:
        run.record(run.steps)
        run.task.train(run)
        recorded = run.recorded_steps()
    rows = [row for row in RunLog.read(run_log_path(tmp_path, 0)) if row["event"] == "step"]
    assert [row["step"] for row in rows] == [1, 3, 4]
    assert [list(row["parts"]) for row in rows] == [["critic"], ["generator", "critic"], ["generator", "critic"]]
    assert [{n: p["step"] for n, p in row["parts"].items()} for row in rows][1:] == [
        {"generator": 2, "critic": 3},
        {"generator": 4, "critic": 4},
    ]
    critic, generator = recorded["parts"]["critic"], recorded["parts"]["generator"]
    assert (critic["step"], generator["step"]) == ([1, 2, 3, 4], [2, 4])
    assert rows[1]["loss"] == pytest.approx(critic["loss"][2] + generator["loss"][0])
    assert rows[1]["norm"] == pytest.approx((critic["norm"][2] ** 2 + generator["norm"][0] ** 2) ** 0.5)
    assert recorded["loss"][2] == pytest.approx(rows[1]["loss"])
    assert [row["parts"]["critic"]["lr"] for row in rows] == pytest.approx([1e-2, 1e-2 / 3, 0.0])
    assert rows[1]["parts"]["generator"]["lr"] == pytest.approx(1e-3 * 2 / 3)


def test_a_report_names_the_parts(tmp_path: Path) -> None:
    """Losses of each, in place of their sum."""
    with running(Gan(), tmp_path, train={"steps": 2}) as run:
        run.task.train(run)
    report = unipar.Report.read(tmp_path)
    assert {name: [step for step, _ in losses] for name, losses in report.parts.items()} == {
        "generator": [2],
        "critic": [1, 2],
    }
    assert report.losses[1][1] == pytest.approx(report.parts["generator"][0][1] + report.parts["critic"][1][1])
    lines = str(report).splitlines()
    assert any(line.startswith("loss of generator  ") for line in lines)
    assert any(line.startswith("loss of critic ") and " at step 1, " in line for line in lines)


def test_the_first_part_is_evaluated(tmp_path: Path) -> None:
    """The task's loss and metrics are those of the first part; metrics may ask the others."""

    class Asking(Pair):
        @override
        def metrics(self, model: nn.Module, batch: Any) -> dict[str, Any]:
            return {"a": model(batch[0]).mean(), "b": self.run.frozen("b")(_apply, batch[0]).mean()}

    with running(Asking(), tmp_path, eval={"every": 3}) as run:
        run.task.train(run)
        found = run.evaluate()
        weights = _weights(run.pieces())
    assert found == {n: pytest.approx(4.5 * weights[f"{n}.weight"].item(), rel=1e-5) for n in ("a", "b")}


def test_one_part_in_a_dict_is_a_model(tmp_path: Path) -> None:
    """Its names are not prefixed, and the default loop trains it."""

    def model() -> dict[str, Any]:
        return {"line": nn.Linear(1, 1, bias=False)}

    with running(Pair(model=model), tmp_path) as run:
        unipar.Task.train(run.task, run)
        assert [p.name for p in run.pieces()] == ["weight"]
    assert [row["event"] for row in RunLog.read(run_log_path(tmp_path, 0))] == ["start", "step", "step", "end"]


def test_together() -> None:
    """At each step the sum of the parts' last losses, and the norm of all their gradients."""
    parts = {
        "a": {"loss": [1.0, 2.0, 3.0], "norm": [3.0, 3.0, 6.0], "step": [1, 2, 3]},
        "b": {"loss": [10.0], "norm": [4.0], "step": [2]},
    }
    assert combine_recorded_parts(parts, 3) == {
        "loss": [1.0, 12.0, 13.0],
        "norm": [3.0, 5.0, pytest.approx(52**0.5)],
        "parts": parts,
    }


def _tied() -> dict[str, Any]:
    line = nn.Linear(1, 1)
    return {"a": line, "b": nn.Sequential(line)}


def _once(**told: Any) -> Callable[[Run], None]:
    def train(run: Run) -> None:
        for local_batch in run.batches():
            run.step(local_batch, **told)

    return train


def _twice(run: Run) -> None:
    for local_batch in run.batches():
        run.step(local_batch, part="a")
        run.step(local_batch, part="a")


def _never(run: Run) -> None:
    for _ in run.batches():
        pass


def _outside(run: Run) -> None:
    run.frozen("a")


def _own(run: Run) -> None:
    for local_batch in run.batches():
        run.step(local_batch, part="a", loss=lambda model, batch: run.frozen("a")(_apply, batch[0]).mean())


def _default(run: TrainingRun) -> None:
    unipar.Task.train(run.task, run)


def _line() -> nn.Module:
    return nn.Linear(1, 1, bias=False)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"model": dict}, "model() returned no part: {}; return a module, or modules by name"),
    ({"model": lambda: {"a.b": _line()}},
     "model() calls a part 'a.b'; the name must be a word of letters, digits and _"),
    ({"model": lambda: {"a": _line(), "b": 3}},
     "model() returned 3 as its part 'b'; it must be a torch.nn.Module"),
    ({"model": lambda: {"a": _line(), "b": _line().requires_grad_(False)}},
     "model(): the part 'b' has no parameter that requires a gradient: there is nothing to train in it; keep it inside "
     "the part that uses it"),
    ({"model": _tied},
     "model(): 'a.weight' and 'b.0.weight' are one tensor; parts are trained separately and cannot share tensors: keep "
     "it in one part, and use that part through run.frozen()"),
    ({"train": _once()},
     "run.step was called without part=: model() returned a, b; call run.step(local_batch, part='a', loss=...)"),
    ({"train": _once(part="b")},
     "run.step(part='b') has no loss: the task's own is for 'a'; give loss="),
    ({"train": _once(part="c")}, "there is no part 'c'; name one of a, b"),
    ({"train": _twice},
     "the loop called run.step(part='a') twice for one local batch; call it at most once for each part"),
    ({"train": _never},
     "the loop called run.step 0 times for one local batch; call it at most once for each part, and for at least one "
     "part, with that local batch"),
    ({"train": _outside},
     "run.frozen('a') was called outside of a loss and metrics: call it in one of them"),
    ({"train": _own},
     "run.frozen('a') was called in that part's own loss: use the loss's first argument, its model"),
    ({"train": _default},
     "model() returned several parts (a, b) and the task has no train(run): write one, which calls "
     "run.step(local_batch, part=..., loss=...) for each part to be trained"),
]  # fmt: skip


@pytest.mark.parametrize(("what", "message"), WRONG)
def test_what_is_refused(tmp_path: Path, what: dict[str, Any], message: str) -> None:
    """Each mistake is a sentence with the way out."""
    error = _refused(Pair(**what), tmp_path)
    assert isinstance(error, TaskError)
    assert str(error) == message


def test_train_parts_names_what_the_model_has(tmp_path: Path) -> None:
    """A part that is not there would have settings without effect."""
    told = {"steps": 3, "parts": {"c": {"clip": 1.0}}}
    error = _refused(Pair(), tmp_path, train=told)
    assert isinstance(error, ConfigError)
    assert str(error) == "train.parts.c: model() returned no part of that name; it has a, b"
    assert str(_refused(Pair(model=_line), tmp_path, train=told)) == (
        "train.parts.c: model() returned one module, which has no parts; set it in train itself"
    )


def test_a_loss_that_is_not_finite_names_its_part(tmp_path: Path) -> None:
    """Found when that part's losses are next reported, though it had no step then."""

    def train(run: Run) -> None:
        for local_batch in run.batches():
            run.step(local_batch, part="a")
            if run.done == 1:
                run.step(local_batch, part="b", loss=lambda model, batch: model(batch[0]).mean() * float("inf"))

    error = _refused(Pair(train), tmp_path, log={"every": 2})
    assert isinstance(error, NonFinite)
    assert str(error) == (
        "the loss of 'b' is not finite at step 2, first on rank 0: look at that batch, the rate (train.optimizer.lr) "
        "and the clip (train.clip)"
    )
