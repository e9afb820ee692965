"""Strategies of a comparison as they are planned: in the compared world, and on other numbers of ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import unipar
from unipar.comparison.make_forecast import OTHER_WORLDS, Forecaster, forecast_path, job_of, write_forecast
from unipar.config import Strategy
from unipar.config.config_source import load_given_config
from unipar.config.settled import SettledConfig
from unipar.distributed.place import Place
from unipar.launcher.strategy_selection import select_strategies
from unipar.planning.peaks import PredictedPeak
from unipar.results.forecast.records import Forecast, StrategyForecast
from unipar.task.reference import TaskRef
from unipar.training.fake_run.task_traces import TaskTraces

ROOT = Path(__file__).parents[2]
CONFIG: dict[str, Any] = {
    "task": {
        "use": f"{ROOT}/examples/char_gpt.py:CharGPT",
        "args": {"layers": 2, "width": 16, "heads": 2, "context": 8},
    },
    "device": "cpu",
    "parallel": {"data": 2},
    "batch": {"total": 8},
    "train": {"steps": 10},
}
STRATEGIES = ("native/nothing", "native/gradients", "native/nothing+tensor2", "horovod")


def settled(**changed: Any) -> SettledConfig:
    return SettledConfig.of(load_given_config(CONFIG | changed, None).config, Strategy("native"), 2, "cpu")


def asked(compared: SettledConfig, memory: int | None) -> Forecast:
    sizes = compared.sizes
    share = sizes.micro * sizes.accumulate
    return Forecast(ranks=2, samples=sizes.total, share=share, memory=memory, memory_from="batch.memory")


def task_of(compared: SettledConfig) -> unipar.Task:
    return TaskRef.of(None, compared.config.task, {}).load()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Forecast:
    """The forecast as a worker writes it."""
    compared, run = settled(), tmp_path_factory.mktemp("run")
    strategies = [at for _, at in select_strategies(compared, STRATEGIES).values() if at is not None]
    job = job_of(asked(compared, 136_000), compared, strategies)
    launch = {
        "task": TaskRef.of(None, compared.config.task, {}).to_json(),
        "settled": compared.to_json(),
        "forecast": job,
    }
    (run / "launch.json").write_text(json.dumps(launch), encoding="utf-8")
    write_forecast(Place(rank=0, size=1, local_rank=0, local_size=1, launcher=""), run, None)
    return Forecast.model_validate_json(forecast_path(run).read_bytes())


def strategy_of(made: Forecast, name: str) -> StrategyForecast:
    found = made.strategy(name)
    assert found is not None
    return found


def peaks_of(phases: tuple[PredictedPeak, ...]) -> dict[str, int]:
    return {phase.phase: phase.peak for phase in phases}


def test_it_predicts_what_plan_does(made: Forecast) -> None:
    """The same peaks and bytes sent in the compared world, and the same peaks where the total batch is kept."""
    plan = unipar.plan(CONFIG, strategies=["native/nothing", "native/gradients", "horovod"], worlds=[1, 2, 8])
    for row in plan.rows:
        strategy = strategy_of(made, row.strategy)
        assert {w.ranks: w.peak for w in strategy.worlds}[row.ranks] == row.peak.peak
        if row.ranks == 2:
            assert {phase.name: phase.peak for phase in strategy.phases} == peaks_of(row.phases)
            sent = {axis: sum(kinds.values()) for axis, kinds in strategy.sent.items()}
            assert sent == {"data": row.sent_bytes}


def test_worlds_and_batches(made: Forecast) -> None:
    """The total batch is kept where it can be divided, and then the share of each rank; one process has one world."""
    batches = {world.ranks: (world.samples, world.micro) for world in strategy_of(made, "native/gradients").worlds}
    assert tuple(batches) == OTHER_WORLDS == (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
    assert [batches[n] for n in (1, 2, 8, 16, 1024)] == [(8, 8), (8, 4), (8, 1), (64, 4), (4096, 4)]
    (one,) = strategy_of(made, "single").worlds
    assert (one.ranks, one.samples, one.micro) == (1, 8, 4)  # two microbatches, as it is compared
    first, second, *_ = strategy_of(made, "native/nothing+tensor2").worlds
    assert (first.peak, second.peak is None) == (None, False)
    assert first.refusal == "native/nothing+tensor2 needs a multiple of 2 ranks (tensor 2), and there are 1"


def test_what_would_have_to_change(made: Forecast) -> None:
    """The same sentences as plan's, for strategies that do not fit in the compared world."""
    assert {strategy.strategy: strategy.ways for strategy in made.strategies} == {
        "single": ("needs 24 KiB more, whatever the micro",),
        "native/nothing": ("needs 71 KiB more, whatever the micro",),
        "native/gradients": ("needs 41 KiB more, whatever the micro", "fits on 4 ranks"),
        "native/nothing+tensor2": ("micro 2 fits",),
        "horovod/nothing": ("needs 1.0 MiB more, whatever the micro",),
    }


def test_total_batches_that_follow_from_others() -> None:
    """Of micro and accumulate: the compared world's total is kept on fewer ranks, and its share on more."""
    compared = settled(batch={"micro": 2, "accumulate": 2})
    (_, (_, at)) = select_strategies(compared, ("native/nothing",)).values()
    assert at is not None
    worlds = Forecaster(compared, task_of(compared), asked(compared, None)).forecast(at).worlds
    told = {world.ranks: (world.samples, world.micro) for world in worlds}
    assert [told[n] for n in (1, 2, 4, 8)] == [(8, 4), (8, 2), (8, 1), (32, 2)]


VALUES = """
import torch
import unipar


class Values(unipar.Task):
    def model(self):
        return torch.nn.Linear(4, 4)

    def data(self):
        return torch.utils.data.TensorDataset(torch.ones(8, 4))

    def loss(self, model, batch):
        loss = model(batch[0]).sum()
        return loss if loss.item() > 0 else -loss
"""


def test_a_strategy_that_is_not_planned_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss that needs values is traced once for all strategies; a defect of planning is told as one."""
    (tmp_path / "values.py").write_text(VALUES, encoding="utf-8")
    compared = settled(task={"use": f"{tmp_path}/values.py:Values"})
    (_, one), (_, at) = select_strategies(compared, ("native/nothing",)).values()
    assert one is not None
    assert at is not None
    traces = Mock(side_effect=TaskTraces)
    monkeypatch.setattr("unipar.training.fake_run.token_traces.TaskTraces", traces)
    forecaster = Forecaster(compared, task_of(compared), asked(compared, None))
    strategies = [forecaster.forecast(each) for each in (one, at)]
    assert [strategy.strategy for strategy in strategies] == ["single", "native/nothing"]
    assert strategies[0].refusal == strategies[1].refusal
    assert strategies[0].refusal.startswith(
        "loss() needs the values of a tensor (aten._local_scalar_dense.default), and"
    )
    assert (forecaster.notes, traces.call_count) == ((), 1)

    def fail(*_: object) -> None:
        raise ValueError("no\nsuch row")

    monkeypatch.setattr(Forecaster, "_planner", fail)
    assert forecaster.forecast(at).refusal == "planning it failed (ValueError: no such row)"
