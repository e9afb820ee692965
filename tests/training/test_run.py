"""The loop's own promises, in one process: what a step, an evaluation and a wrong task give."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

import unipar
from tests.support.running import Line, running
from unipar.errors import NonFinite, Stopped, TaskError, UniparError
from unipar.memory.account import PhasePeak
from unipar.report.data.run_data import RunPageData
from unipar.report.pages.run_page import render_run
from unipar.run_folder.layout import run_log_path
from unipar.run_folder.run_log import RunLog
from unipar.task import Run
from unipar.task.run import Position

if TYPE_CHECKING:
    from unipar.memory.recording.memory_log import StepMemory


def _ended(task: unipar.Task, folder: Path, **sections: Any) -> UniparError:
    """What a whole run of the task raises."""
    with pytest.raises(UniparError) as e, running(task, folder, **sections) as run:
        task.train(run)
    return e.value


class Wide(Line):
    """A line through three layers, of which the first two may multiply in fp8."""

    def __init__(self, *, by_hand: bool = False) -> None:
        self.by_hand = by_hand

    @override
    def model(self) -> Any:
        return nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 1))

    @override
    def loss(self, model: Any, batch: Any) -> Any:
        x, y = batch
        x = x.expand(-1, 16)
        if self.by_hand:
            return (model[2](nn.functional.linear(model[0](x), model[1].weight)) - y).square().mean()
        return (model(x) - y).square().mean()


IN_FP8: dict[str, Any] = {"train": {"steps": 3, "precision": "fp8"}, "model": {"blocks": "none"}}


def test_layers_in_fp8_are_noted(tmp_path: Path) -> None:
    """Before the first step which they are, and after it what they ran; the run's page has both."""
    with running(Wide(), tmp_path, **IN_FP8) as run:
        run.task.train(run)
    said = [row["said"] for row in RunLog.read(run_log_path(tmp_path, 0)) if row["event"] == "precision"]
    assert said == [
        "fp8 (tensorwise, emulated in fp32) in 2 of 3 linear layers: 0, 1; in bf16: 2 (the last)",
        "2 of 2 linear layers ran emulated in fp32",
    ]
    page = render_run(RunPageData.read(run_log_path(tmp_path, 0)))
    assert all(f"<li>{sentence}" in page for sentence in said)


def test_a_layer_that_leaves_fp8_ends_the_run(tmp_path: Path) -> None:
    """In the first step, with its name."""
    assert str(_ended(Wide(by_hand=True), tmp_path, **IN_FP8)) == (
        "train.precision: fp8, and 1 linear layer did not multiply in fp8: 1 was not called, and its weight was used; "
        "call each layer itself, under the run's autocast, or take bf16-mixed"
    )


def test_what_a_step_gives(tmp_path: Path) -> None:
    """The first, every second and the last step know the global loss; the others cost no reduction."""
    with running(Line(), tmp_path) as run:
        outcomes = [run.step(local_batch) for local_batch in run.batches()]
        assert [o.step for o in outcomes] == [1, 2, 3]
        assert [o.loss is not None for o in outcomes] == [True, False, True]
        assert run.position == Position(step=3, epoch=1, batch=0)
    rows = list(RunLog.read(run_log_path(tmp_path, 0)))
    assert [row["event"] for row in rows] == ["start", "step", "step", "end"]
    assert (rows[0]["strategy"], rows[0]["parameters"], rows[1]["step"], rows[1]["samples"]) == ("single", 1, 1, 4)
    assert rows[2]["samples"] == 2  # ten samples in batches of four: the third holds two
    assert rows[3]["steps"] == 3


def test_looking_at_memory_is_no_part_of_a_steps_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that stands still but in a look, which takes a minute, a step takes no time."""
    clock = [0.0]

    class Looks:
        lost = ""

        def before(self, *, logs: bool) -> None:
            clock[0] += 60

        def after(self) -> list[PhasePeak]:
            clock[0] += 60
            return []

    with running(Line(), tmp_path) as run:
        monkeypatch.setattr("unipar.training.step_log.time", SimpleNamespace(perf_counter=lambda: clock[0]))
        run.attach_step_memory(cast("StepMemory", Looks()))
        run._log._since = 0.0  # pyright: ignore[reportPrivateUsage]
        run.task.train(run)
    assert clock == [300.0]
    rows = [row for row in RunLog.read(run_log_path(tmp_path, 0)) if row["event"] == "step"]
    assert [row["seconds"] for row in rows] == [0.0, 0.0]


def test_epochs_are_counted_from_the_data(tmp_path: Path) -> None:
    """Two epochs of ten samples in batches of four are six steps."""
    with running(Line(), tmp_path, train={"epochs": 2}) as run:
        assert run.steps == 6
        assert sum(1 for local_batch in run.batches() if run.step(local_batch)) == 6


def test_a_share_is_what_collate_made(tmp_path: Path) -> None:
    """Two microbatches of two samples; the weights are those of the global batch."""
    with running(Line(), tmp_path) as run:
        local_batch = next(run.batches())
        assert len(local_batch) == 2
        assert local_batch.samples == 4
        assert local_batch[0][0].shape == (2, 1)
        assert [m.scale for m in local_batch.micros] == [0.5, 0.5]


def test_over_a_loader_of_the_scripts_own(tmp_path: Path) -> None:
    """The loader's dataset, in its order; the run's own data is not asked for."""

    class Bare(Line):
        @override
        def data(self) -> Any:
            raise AssertionError("data() was asked for")

    with running(Bare(), tmp_path) as run:
        loader = DataLoader(Line().data(), batch_size=2)
        seen = [local_batch[0][0].flatten().tolist() for local_batch in run.over(loader) if run.step(local_batch)]
    assert seen == [[1.0, 2.0], [5.0, 6.0], [9.0]]


def test_evaluation_by_itself_and_between_steps(tmp_path: Path) -> None:
    """`eval.every` evaluates between steps; a task's own loop may ask at any time; both are written down."""
    with running(Line(), tmp_path, eval={"every": 2, "batches": 1}) as run:
        for local_batch in run.batches():
            run.step(local_batch)
        found = run.evaluate()
        weight = next(run.engine.pieces()).tensor.item()
    assert found == {"loss": pytest.approx(30 / 4 * (weight - 2) ** 2, rel=1e-6)}
    events = [(row["event"], row.get("step")) for row in RunLog.read(run_log_path(tmp_path, 0))]
    assert events == [("start", None), ("step", 1), ("eval", 2), ("step", 3), ("eval", 3), ("end", None)]


def test_metrics_with_weights_of_their_own(tmp_path: Path) -> None:
    """A (mean, weight) is averaged by its weight, the rest by samples."""

    class Weighed(Line):
        @override
        def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
            x = batch[0]
            return {"x": x.mean(), "heavy": ((x * x).sum() / x.sum(), x.sum())}

    with running(Weighed(), tmp_path) as run:
        found = run.evaluate()
    assert found == {"x": 5.5, "heavy": pytest.approx(7.0)}  # 385 / 55


def test_log(tmp_path: Path) -> None:
    """Named values go into the run log with the step they belong to."""
    with running(Line(), tmp_path) as run:
        run.step(next(run.batches()))
        run.log(temperature=torch.tensor(0.5), lamps=2)
    row = next(row for row in RunLog.read(run_log_path(tmp_path, 0)) if row["event"] == "log")
    assert (row["step"], row["temperature"], row["lamps"]) == (1, 0.5, 2.0)


def test_a_stop_comes_at_a_step_boundary(tmp_path: Path) -> None:
    """SIGTERM during step 2: its update is made, and the run ends before step 3."""

    class Interrupted(Line):
        @override
        def train(self, run: Run) -> None:
            for local_batch in run.batches():
                if run.done == 1:
                    signal.raise_signal(signal.SIGTERM)
                run.step(local_batch)

    error = _ended(Interrupted(), tmp_path)
    assert isinstance(error, Stopped)
    assert str(error) == "stopped by a signal after step 2"
    assert [row["event"] for row in RunLog.read(run_log_path(tmp_path, 0))] == ["start", "step", "stopped"]


def test_a_second_signal_means_what_it_always_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between steps nothing reacts to the first; the second interrupts."""
    monkeypatch.setattr("unipar.training.stopping.SAME_SIGNAL_SECONDS", 0.0)
    with running(Line(), tmp_path) as run:
        signal.raise_signal(signal.SIGINT)
        assert run.done == 0
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.filterwarnings("ignore")  # libraries' own
def test_a_run_that_failed_leaves_no_world_behind(tmp_path: Path) -> None:
    """The next run of the process starts afresh, in the environment that was there before."""

    def told() -> dict[str, str]:
        ours = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "GLOO_", "NCCL_", "HOROVOD_")
        return {name: value for name, value in os.environ.items() if name.startswith(ours)}

    before = told()
    for backend in ("accelerate", "deepspeed", "single"):
        assert isinstance(_ended(Broken(train=_bare), tmp_path, backend=backend), TaskError)
        assert not torch.distributed.is_initialized()
        assert told() == before


@pytest.mark.filterwarnings("ignore")  # libraries' own
def test_two_runs_in_one_process(tmp_path: Path) -> None:
    """Every library starts again."""
    for backend in ("horovod", "accelerate", "horovod", "native"):
        with running(Line(), tmp_path, backend=backend) as run:
            run.task.train(run)
            assert run.done == 3


def test_an_evaluation_that_cannot_be_is_refused_at_the_start(tmp_path: Path) -> None:
    """Not after the first five thousand steps."""

    class Blind(unipar.Task):
        model, data, loss = Line.model, Line.data, Line.loss

    error = _ended(Blind(), tmp_path, eval={"every": 2})
    assert str(error) == "eval.every is given and the task has no validation(): give it a dataset, or leave eval out"


def test_what_json_cannot_say_is_null(tmp_path: Path) -> None:
    """NaN and infinity are no JSON."""
    with RunLog(tmp_path / "x") as run_log:
        run_log.note("log", a=float("nan"), b=float("inf"), c=1.5)
    (row,) = RunLog.read(tmp_path / "x")
    assert (row["a"], row["b"], row["c"]) == (None, None, 1.5)


def test_signals_are_given_back(tmp_path: Path) -> None:
    """A run takes SIGINT and SIGTERM for itself while it lasts; what was asked of it does not end the next."""
    before = signal.getsignal(signal.SIGINT)
    with running(Line(), tmp_path) as run:
        assert signal.getsignal(signal.SIGINT) != before
        run.task.train(run)
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGINT) == before
    with running(Line(), tmp_path) as run:
        run.task.train(run)
        assert run.done == 3


class Broken(Line):
    """What `loss`, `weight`, `metrics`, `model` or `train` give instead of what is wanted."""

    def __init__(self, **what: Any) -> None:
        self.what = what

    @override
    def defines(self, name: str) -> bool:
        return name in self.what or super().defines(name)

    @override
    def model(self) -> Any:
        return self.what["model"]() if "model" in self.what else super().model()

    @override
    def loss(self, model: Any, batch: Any) -> Any:
        return self.what["loss"](model, batch) if "loss" in self.what else super().loss(model, batch)

    @override
    def weight(self, batch: Any) -> Any:
        return self.what.get("weight")

    @override
    def validation(self) -> Any:
        return self.what["validation"] if "validation" in self.what else super().validation()

    @override
    def metrics(self, model: Any, batch: Any) -> Any:
        return self.what["metrics"] if "metrics" in self.what else super().metrics(model, batch)

    @override
    def train(self, run: Run) -> None:
        return self.what["train"](run) if "train" in self.what else super().train(run)


def _twice(run: Run) -> None:
    for local_batch in run.batches():
        run.step(local_batch)
        run.step(local_batch)


def _never(run: Run) -> None:
    for _ in run.batches():
        pass


def _bare(run: Run) -> None:
    for local_batch in run.batches():
        step: Any = run.step
        step(local_batch[0])


def _number(model: Any, batch: Any) -> Any:
    return 1.5


def _vector(model: Any, batch: Any) -> Any:
    return model(batch[0])


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"loss": _number}, "loss() returned 1.5; return the mean over the batch as a scalar tensor"),
    ({"loss": _vector},
     "loss() returned a tensor of shape (2, 1); return the mean over the batch as a scalar tensor"),
    ({"model": lambda: 3}, "model() returned 3; it must return a torch.nn.Module"),
    ({"model": lambda: nn.Linear(1, 1).requires_grad_(False)},
     "model() has no parameter that requires a gradient: there is nothing to train"),
    ({"weight": -2.0}, "weight(batch) is -2; it must not be negative"),
    ({"weight": 0.0}, "weight(batch) is 0 over the global batch of step 1; it must be above 0 for one sample"),
    ({"metrics": 3.0}, "metrics() returned 3.0; return a mapping of names to means or to pairs (mean, weight)"),
    ({"metrics": {"x": torch.ones(2)}}, "metrics()['x'] has the shape (2,); return one number"),
    ({"validation": None},
     "there is nothing to evaluate: give the task validation(), a dataset, or leave eval out"),
    ({"validation": TensorDataset(torch.ones(0, 1))}, "validation() has no samples"),
    ({"train": _twice}, "the loop called run.step 2 times for one local batch; call it once, with that local batch"),
    ({"train": _never}, "the loop called run.step 0 times for one local batch; call it once, with that local batch"),
]  # fmt: skip


@pytest.mark.parametrize(("what", "message"), WRONG)
def test_a_task_that_is_wrong(tmp_path: Path, what: dict[str, Any], message: str) -> None:
    """Each mistake is a sentence about the method that made it."""
    error = _ended(Broken(**what), tmp_path, eval={"every": 1})
    assert isinstance(error, TaskError)
    assert str(error) == message


def test_a_step_takes_a_share(tmp_path: Path) -> None:
    """A batch alone has no weight."""
    error = _ended(Broken(train=_bare), tmp_path)
    assert str(error).startswith("run.step takes a LocalBatch, as run.batches() and run.over() yield; it got [tensor(")


def test_a_loss_that_is_not_finite(tmp_path: Path) -> None:
    """Found on the next step that logs, with the step where it began."""

    def late(model: Any, batch: Any) -> Tensor:
        x, y = batch
        return (model(x) - y).square().mean() * torch.where((x == 1.0).any(), float("inf"), 1.0)

    error = _ended(Broken(loss=late), tmp_path, data={"shuffle": False}, train={"steps": 6}, log={"every": 5})
    assert isinstance(error, NonFinite)
    assert str(error) == (
        "the loss is not finite at step 1, first on rank 0: look at that batch, the rate (train.optimizer.lr) "
        "and the clip (train.clip)"
    )


def test_run_logs_are_lines_of_json(tmp_path: Path) -> None:
    """Anything reads them; a last line that was not finished is left out."""
    with running(Line(), tmp_path) as run:
        run.task.train(run)
    text = run_log_path(tmp_path, 0).read_text("utf-8")
    assert [json.loads(line)["event"] for line in text.splitlines()] == ["start", "step", "step", "end"]
    run_log_path(tmp_path, 0).write_text(text[:-2], "utf-8")
    assert [row["event"] for row in RunLog.read(run_log_path(tmp_path, 0))] == ["start", "step", "step"]
