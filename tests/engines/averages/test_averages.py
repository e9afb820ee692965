"""`train.ema`: what a run has of its averages, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from tests.support.running import Line, running
from unipar.backend import Engine, Factor, LossFn, Mark, Micro, Piece, Step
from unipar.backend.engine import DelegatingEngine
from unipar.config import Config
from unipar.config.config_source import load_given_config
from unipar.config.sections.train import Ema
from unipar.engines.averages.engine import AveragingEngine, with_averages, without_counts
from unipar.errors import CheckpointError, ConfigError, TaskError
from unipar.training.training_run import TrainingRun

IN_PLACE = (
    "the model has the averages of train.ema in place of its weights: do this outside of `with run.averaged():` (an "
    "error inside it leaves them there)"
)


def _train(**ema: Any) -> dict[str, Any]:
    return {"steps": 4, "optimizer": {"name": "sgd", "lr": 1e-3}, "ema": ema}


def _weight(run: TrainingRun) -> float:
    return float(run.parts["model"].module.get_parameter("weight").detach())


class _Watched(Line):
    """Notes the weight that metrics see."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    @override
    def metrics(self, model: Any, batch: Any) -> Any:
        self.seen.append(float(model.weight.detach()))
        return {"loss": self.loss(model, batch)}


@pytest.mark.parametrize("ema", [{"decay": 0.75}, {"decay": 0.75, "warmup": 1}, {"decay": 0.5, "every": 2}])
def test_an_evaluation_sees_the_averages(ema: dict[str, Any], tmp_path: Path) -> None:
    """And training goes on with the weights, to the last bit."""
    watched, weights = _Watched(), list[float]()
    with running(watched, tmp_path, train=_train(**ema)) as run:
        average = torch.tensor(_weight(run))
        for k, local_batch in enumerate(run.batches(), 1):
            run.step(local_batch)
            before = _weight(run)
            weights.append(before)
            update, due = divmod(k, ema.get("every", 1))
            if not due:
                decay = min(ema["decay"], update / (update + ema.get("warmup", 0)))
                average = average + (1 - decay) * (torch.tensor(before) - average)
            run.evaluate()
            assert watched.seen[-1] == float(average)
            assert _weight(run) == before
    assert watched.seen[-1] not in weights
    with running(Line(), _beside(tmp_path), train=_train() | {"ema": None}) as run:
        run.task.train(run)
        assert _weight(run) == weights[-1]


def test_a_loop_of_ones_own_sees_them_too(tmp_path: Path) -> None:
    """`run.averaged()` inside an evaluation, or twice, changes nothing; without `train.ema` it does nothing."""
    task = _Watched()
    with running(task, tmp_path, train=_train(decay=0.5)) as run:
        run.task.train(run)
        raw = _weight(run)
        with run.averaged():
            averaged = _weight(run)
            with run.averaged():
                assert _weight(run) == averaged
            run.evaluate()
            assert _weight(run) == averaged
        assert (_weight(run), task.seen[-1]) == (raw, averaged)
        assert averaged != raw
    with running(Line(), _beside(tmp_path)) as run:
        before = _weight(run)
        with run.averaged():
            assert _weight(run) == before


def test_no_step_and_no_save_with_averages_in_place(tmp_path: Path) -> None:
    """Also after an error that a loop has caught: what is trained would be something else, silently."""
    with running(Line(), tmp_path, train=_train(), checkpoint={"async": False}) as run:
        local_batches = run.batches()
        local_batch = next(local_batches)
        with run.averaged():
            with pytest.raises(TaskError) as of_step:
                run.step(local_batch)
            with pytest.raises(CheckpointError) as of_save:
                run.save()
        with pytest.raises(ZeroDivisionError), run.averaged():
            raise ZeroDivisionError
        with pytest.raises(TaskError) as after_error:
            run.step(local_batch)
        _put_weights_back(run.engine)
        run.step(local_batch)
        for one in local_batches:
            run.step(one)
    assert str(of_step.value) == str(after_error.value) == f"run.step(): {IN_PLACE}"
    assert IN_PLACE in str(of_save.value)


def _put_weights_back(engine: Engine) -> None:
    assert isinstance(engine, AveragingEngine)
    engine._exchange()  # pyright: ignore[reportPrivateUsage]


def test_they_are_held_in_a_category_of_their_own(tmp_path: Path) -> None:
    """One tensor for each trained weight, in fp32; a frozen one has none."""

    class Frozen(Line):
        @override
        def model(self) -> Any:
            model = nn.Linear(1, 1)
            model.bias.requires_grad_(False)
            return model

    with running(Frozen(), tmp_path, train=_train()) as run:
        run.task.train(run)
        held = [(h.name, h.tensor.dtype) for h in run.engine.holdings() if h.category == "averages"]
        assert held == [("weight", torch.float32)]
        assert [p.name for p in run.engine.pieces() if p.kind == "average"] == ["weight"]


class _Skipping(DelegatingEngine):
    """Engine whose second step an overflow leaves out."""

    def __init__(self, inner: Engine, *, as_tensor: bool = False) -> None:
        super().__init__(inner)
        self.steps, self.as_tensor = 0, as_tensor

    @override
    def step(self, fn: LossFn, micros: Any, factor: Factor, mark: Mark) -> Step:
        self.steps += 1
        skipped = self.steps == 2
        out = Step(torch.zeros(()), torch.zeros(())) if skipped else super().step(fn, micros, factor, mark)
        return replace(out, skipped=torch.tensor(skipped) if self.as_tensor else skipped)


class _Bare(DelegatingEngine):
    """Engine that does not show its weights."""

    @override
    def full_weights(self) -> Iterator[Piece]:
        return Engine.full_weights(self)


MICRO = [Micro((torch.ones(1, 1), torch.ones(1, 1)), 1.0)]


def _square_error(model: nn.Module, batch: tuple[Tensor, Tensor], number: int) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def test_a_skipped_step_is_not_counted(tmp_path: Path) -> None:
    """Nor averaged; and counts go into the state and out of it."""
    with running(Line(), tmp_path) as run:
        engine = with_averages(_Skipping(run.engine), Ema(decay=0.5, every=2))
        for _ in range(4):
            engine.step(_square_error, MICRO, 1.0, lambda phase: None)
        assert engine.counters() == {"ema steps": 3, "ema updates": 1}
        assert without_counts(engine.counters() | {"loss_scale": 4.0}) == {"loss_scale": 4.0}
        again = with_averages(run.engine, Ema(decay=0.5, every=2))
        again.restore_counters(engine.counters())
        assert again.counters() == engine.counters()
        assert with_averages(run.engine, None) is run.engine


@pytest.mark.parametrize("warmup", [0, 3])
def test_a_step_is_skipped_on_the_device(warmup: int, tmp_path: Path) -> None:
    """Averages and counts are those of a host that knows of it, to the last bit."""

    def train(*, as_tensor: bool) -> tuple[dict[str, float], list[Any]]:
        folder = tmp_path / str(as_tensor)
        folder.mkdir()
        with running(Line(), folder) as run:
            skipping = _Skipping(run.engine, as_tensor=as_tensor)
            engine = with_averages(skipping, Ema(decay=0.7, warmup=warmup))
            for _ in range(5):
                engine.step(_square_error, MICRO, 1.0, lambda phase: None)
            return engine.counters(), [h.tensor.tolist() for h in engine.holdings() if h.category == "averages"]

    known, on_device = train(as_tensor=False), train(as_tensor=True)
    assert on_device == known
    assert known[0] == {"ema steps": 4, "ema updates": 4}


def test_weights_that_are_updated_in_bf16(tmp_path: Path) -> None:
    """A thousandth of the distance would be less than their last place."""
    with running(Line(), tmp_path) as run:
        run.parts["model"].module.bfloat16()
        with pytest.raises(TaskError) as e:
            with_averages(run.engine, Ema())
    assert str(e.value) == (
        "train.ema is not available here: weight is updated in bfloat16, in which a thousandth of a distance is lost; "
        "leave train.ema out, or use bf16-master in a backend with fp32 masters"
    )


def test_an_engine_that_does_not_show_its_weights(tmp_path: Path) -> None:
    """Such an engine cannot be averaged, and says so."""
    with running(Line(), tmp_path) as run, pytest.raises(TaskError) as e:
        with_averages(_Bare(run.engine), Ema())
    assert str(e.value) == (
        "train.ema is not available here: _Bare does not show the weights that its optimizer updates "
        "(Engine.full_weights); leave train.ema out, or use another backend"
    )


@pytest.mark.parametrize(
    ("ema", "sentence"),
    [
        (
            {"decay": 1.0},
            "train.ema.decay: 1 is no share of an average that can stay: write a number above 0 and below 1; with "
            "0.999 it is that of about the last 1,000 updates",
        ),
        ({"decay": -0.5}, "train.ema.decay: -0.5 is no share of an average that can stay: write a number above 0"),
        ({"every": 0}, "train.ema.every: 0 is no number of steps: write at least 1, which updates after every step"),
        ({"warmup": -1}, "train.ema.warmup"),
        ({"rate": 1}, "train.ema.rate"),
    ],
)
def test_refused_values(ema: dict[str, Any], sentence: str) -> None:
    """Each by its key, with the value and the way out."""
    with pytest.raises(ConfigError) as e:
        _config(ema=ema)
    assert sentence in str(e.value)


def test_no_averages_of_ranks_that_step_by_themselves() -> None:
    """Each would average weights of its own."""
    with pytest.raises(ConfigError) as e:
        _config(ema={}, local_steps=4)
    assert (
        "local_steps (4) and ema exclude each other: between two means each rank has its own weights, and would have "
        "its own averages; leave one of them out"
    ) in str(e.value)


def test_decay_rises_with_a_warm_up() -> None:
    """From 1/10 with 9, as (1 + n) / (10 + n) does; without one it is the same from the first update on."""
    rising = Ema(decay=0.6, warmup=9)
    assert [rising.decay_at(k) for k in (1, 2, 3, 100)] == [1 / 10, 2 / 11, 3 / 12, 0.6]
    assert [Ema(decay=0.6).decay_at(k) for k in (1, 2)] == [0.6, 0.6]


def _config(**train: Any) -> Config:
    return load_given_config({"batch": {"total": 4}, "train": {"steps": 1} | train}).config


def _beside(folder: Path) -> Path:
    """Return a new folder for a second run."""
    (folder / "without").mkdir()
    return folder / "without"
