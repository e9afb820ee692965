"""Runs whose batches are counted in tokens: the same in another world after a checkpoint, and what they refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, WeightedRandomSampler
from typing_extensions import override

import unipar
from tests.conformance.lengths import Counted
from tests.support.run_logs import step_losses
from tests.support.running import Line, running
from tests.support.world import ROOT
from unipar.backend.offered_strategies import config_in_strategy
from unipar.config import Config, Strategy
from unipar.errors import CheckpointError, ConfigError, OutOfMemory, TaskError
from unipar.run_folder.layout import run_log_path
from unipar.run_folder.run_log import RunLog
from unipar.training.task_facts import gather_task_facts

pytestmark = pytest.mark.forked

TASK = {"use": f"{ROOT}/tests/conformance/lengths.py:Counted"}
BATCH = {"tokens": 70, "max_length": 8, "micro": 20}


def _config(out: Path, ranks: int, batch: Any = BATCH, **more: Any) -> Config:
    made = {
        "task": TASK,
        "device": "cpu",
        "parallel": {"data": ranks},
        "batch": batch,
        "train": {"steps": 8, "optimizer": {"name": "adamw", "lr": 0.01, "eps": 1e-6}},
        "checkpoint": {"every": 5},
        "log": {"every": 1},
        "out": str(out),
    }
    return Config.model_validate(made | more)


def _column(run: Path, name: str) -> list[Any]:
    return [row[name] for row in RunLog.read(run_log_path(run, 0)) if row["event"] == "step"]


@pytest.mark.parametrize("batch", [BATCH, {"tokens": 70, "accumulate": 2}])
def test_a_run_goes_on_in_another_world(tmp_path: Path, batch: dict[str, Any]) -> None:
    """After five of eight steps on two ranks, which end within the second epoch, one rank does the other three."""
    whole, rest = tmp_path / "whole", tmp_path / "rest"
    unipar.launch(_config(whole, 2, batch), quiet=True)
    start = str(whole / "checkpoints" / "step-00000005")
    unipar.launch(_config(rest, 1, batch, resume=start), quiet=True)
    assert _column(rest, "samples") == _column(whole, "samples")[5:]
    assert len(set(_column(whole, "samples"))) > 1
    assert _column(rest, "loss") == pytest.approx(_column(whole, "loss")[5:], abs=1e-6)
    assert len(_column(rest, "loss")) == 3


def test_lengths_are_measured_once(tmp_path: Path) -> None:
    """The run log says how many tokens there are, and steps have tokens a second."""
    with running(Counted(), tmp_path, batch=BATCH) as run:
        run.task.train(run)
    rows = list(RunLog.read(run_log_path(tmp_path, 0)))
    said = next(row["said"] for row in rows if row["event"] == "data")
    assert said.startswith("64 samples of 301 tokens, the longest of 8, measured in ")
    assert all(row["tokens_per_second"] > row["samples_per_second"] for row in rows if row["event"] == "step")


class _Ends(Counted):
    """One epoch at most."""

    @override
    def validation(self) -> Any:
        return [(torch.ones(9, dtype=torch.int64), 8), (torch.ones(12, dtype=torch.int64), 11)]


def test_a_sample_of_the_validation_is_too_long(tmp_path: Path) -> None:
    """The sample is refused by its index before the first evaluation."""
    with pytest.raises(ConfigError) as e, running(_Ends(), tmp_path, batch=BATCH) as run:
        run.evaluate()
    assert str(e.value) == (
        "batch.max_length: 8: sample 1 of validation() has 11 tokens, more than that; cut or leave out such samples in "
        "the dataset, or raise batch.max_length to the longest one's 11"
    )


def test_facts_count_the_steps_of_all_epochs() -> None:
    """Epochs of shuffled samples have different numbers of batches."""
    config = _config(Path("out"), 1, train={"epochs": 4})
    facts = gather_task_facts(config, config.batch.settle(1))
    assert (facts.samples, facts.per_epoch, facts.steps) == (64, 5, 20)


class _Sampled(Line):
    """Line whose samples a sampler of its own picks."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    @override
    def data(self) -> Any:
        sampler = WeightedRandomSampler([1.0] * 10, 7, generator=torch.Generator().manual_seed(self.seed))
        return DataLoader(super().data(), sampler=sampler)


def test_a_sampler_goes_on(tmp_path: Path) -> None:
    """A run that goes on in the middle of the second epoch has the losses of one that was not stopped."""
    checkpoint, whole = {"checkpoint": {"every": 3}, "log": {"every": 1}}, tmp_path / "whole"
    with running(_Sampled(1), _made(whole), **checkpoint, train=_STEPS) as run:
        run.task.train(run)
    resume = str(whole / "checkpoints" / "step-00000003")
    with running(_Sampled(1), _made(tmp_path / "rest"), **checkpoint, train=_STEPS, resume=resume) as run:
        run.task.train(run)
    assert step_losses(tmp_path / "rest") == step_losses(whole)[3:]
    assert len(step_losses(whole)) == 5
    for task, which in (
        (_Sampled(2), "the DataLoader's sampler gives another order"),
        (Line(), "the DataLoader had a sampler of its own, and has none now"),
    ):
        with pytest.raises(CheckpointError) as e, running(task, _made(tmp_path / which[:30]), resume=resume):
            pass
        assert str(e.value) == (
            f"checkpoint {resume}: {which} in epoch 2, of which 4 samples were read: go on with the same sampler, "
            "drawn from the global generators, or begin a run with these weights (model.weights)"
        )


_STEPS = {"steps": 5, "optimizer": {"name": "sgd", "lr": 1e-3}}


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_a_sampler_in_the_validation_is_refused(tmp_path: Path) -> None:
    """An evaluation reads every sample once."""

    class Evaluated(Line):
        @override
        def validation(self) -> Any:
            return _Sampled(0).data()

    with pytest.raises(TaskError) as e, running(Evaluated(), tmp_path) as run:
        run.evaluate()
    assert str(e.value) == (
        "validation() returned a DataLoader with a sampler of its own (WeightedRandomSampler); an evaluation reads "
        "every sample once: leave it out"
    )


class _Widths(Counted):
    """Notes the samples and tokens of each batch that the loss gets."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, int]] = []

    @override
    def loss(self, model: Any, batch: Any) -> Any:
        self.seen.append((len(batch.lengths), int(batch.lengths.max())))
        return super().loss(model, batch)


@pytest.mark.parametrize(
    ("batch", "tried", "said"),
    [
        (
            BATCH,
            [(2, 8), (4, 5), (4, 5), (2, 8)],
            "the largest microbatches, 2 x 8 tokens and 4 x 5 tokens, were tried before the first step",
        ),
        (
            {"tokens": 70},
            [(1, 8), (16, 8), (1, 8)],
            "the largest microbatches, 1 x 8 tokens and 16 x 8 tokens, were tried before the first step",
        ),
    ],
)
def test_the_largest_microbatches_come_first(
    tmp_path: Path, batch: dict[str, Any], tried: list[tuple[int, int]], said: str
) -> None:
    """They are tried on a model of their own: the run has the bits that it has without them."""
    task, plain = _Widths(), _Widths()
    with running(plain, _made(tmp_path / "plain"), batch=batch, log={"every": 1}) as run:
        run.task.train(run)
    with running(task, _made(tmp_path / "tried"), batch=batch | {"memory_check": True}, log={"every": 1}) as run:
        run.task.train(run)
    assert task.seen[: len(tried)] == tried
    assert task.seen[len(tried) :] == plain.seen
    assert step_losses(tmp_path / "tried") == step_losses(tmp_path / "plain")
    rows = list(RunLog.read(run_log_path(tmp_path / "tried", 0)))
    assert said in [row.get("said") for row in rows]
    assert [row["event"] for row in rows].count("start") == 1


class _Full(_Widths):
    """As if memory ended at batches of sixteen tokens."""

    @override
    def loss(self, model: Any, batch: Any) -> Any:
        if batch.lengths.numel() * int(batch.lengths.max()) > 16:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return super().loss(model, batch)


def test_a_lack_of_memory_shows_before_the_first_step(tmp_path: Path) -> None:
    """The error has the sizes, and the keys to change."""
    with (
        pytest.raises(OutOfMemory) as e,
        running(_Full(), tmp_path, batch=BATCH | {"memory_check": True}) as run,
    ):
        run.task.train(run)
    assert str(e.value) == (
        "batch.memory_check: rank 0 has no memory for the largest microbatches of the run, 2 x 8 tokens and 4 x 5 "
        "tokens (CUDA out of memory. Tried to allocate 2.00 GiB): lower batch.micro, or cut samples to a smaller "
        "batch.max_length"
    )
    assert not any(row["event"] == "step" for row in RunLog.read(run_log_path(tmp_path, 0)))


@pytest.mark.parametrize(
    "strategy",
    [
        "deepspeed/parameters",
        pytest.param("native/parameters", marks=pytest.mark.sweep),
        pytest.param("native/nothing", marks=pytest.mark.sweep),
        pytest.param("horovod/nothing", marks=pytest.mark.sweep),
        pytest.param("accelerate/gradients", marks=pytest.mark.sweep),
        pytest.param("native/nothing+tensor2", marks=pytest.mark.sweep),
    ],
)
def test_a_model_that_is_thrown_away_leaves_nothing(tmp_path: Path, strategy: str) -> None:
    """In each library a run has the same losses with and without one before it."""
    losses: list[Any] = []
    for tries in (False, True):
        out = tmp_path / str(tries)
        config = config_in_strategy(
            _config(out, 2, BATCH | {"memory_check": tries}, checkpoint=None), Strategy.parse(strategy)
        )
        unipar.launch(config, quiet=True)
        losses.append(step_losses(out))
    assert losses[0] == losses[1]
    assert len(losses[0]) == 8


def test_parts_have_no_loss_to_try(tmp_path: Path) -> None:
    """Which loss a part takes is known to the task's loop alone."""

    class Parts(Counted):
        @override
        def model(self) -> Any:
            return {"one": super().model(), "other": super().model()}

    with (
        pytest.raises(TaskError) as e,
        running(Parts(), tmp_path, batch=BATCH | {"memory_check": True}),
    ):
        pass
    assert str(e.value) == (
        "batch.memory_check: true: model() returned several parts (one, other), and which loss each takes is known to "
        "the task's loop alone; leave it out"
    )
