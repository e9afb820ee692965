"""Twelve tasks train to the losses, norms and rates of loops by hand in plain PyTorch, to six digits."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import unipar
from tests.support.forks import Forks
from tests.support.hand_loops import HAND_LOOPS, STEPS, Step, save_pretrained
from tests.support.hand_loops_inside import config_of, logged_steps
from tests.support.running import running
from tests.support.world import PYTHONPATH_VARIABLE
from unipar.errors import UniparError
from unipar.launcher.processes.group import WorkerGroup

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")
"""The newest transformers has a new name for it; older ones, and peft, do not."""

STRATEGIES = ("native/nothing", "native/parameters", "deepspeed/gradients")
SIX_DIGITS = 1e-6

OF_NORMS = 5e-6
"""Limit for norms: Adam enlarges the rounding of gradients near zero, which differs between kinds of processors."""

Rows = list[dict[str, Any]]
LoopByHand = Callable[[str], list[Step]]
InWorld = Callable[[str, str], Rows]


@pytest.fixture(scope="module")
def saved_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small GPT-2, saved by `save_pretrained`."""
    folder = tmp_path_factory.mktemp("pretrained")
    save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def by_hand(saved_model: Path) -> LoopByHand:
    """Steps of a task's loop by hand."""

    @cache
    def steps(name: str) -> list[Step]:
        case = HAND_LOOPS[name]
        return case.by_hand(case.make_task(saved_model))[0]

    return steps


@pytest.fixture(scope="module")
def in_world(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, forks: Forks, saved_model: Path
) -> InWorld:
    """Steps that a world of two ranks has logged; all tasks that are asked for with a strategy share a world."""

    @cache
    def folder_of(strategy: str) -> Path:
        calls = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
        names = [call.params["name"] for call in calls if call and call.params.get("strategy") == strategy]
        backend, _, shard = strategy.partition("/")
        folder = tmp_path_factory.mktemp("world")
        asked = {"backend": backend, "shard": shard, "tasks": names, "pretrained": str(saved_model)}
        (folder / "tasks.json").write_text(json.dumps(asked), "utf-8")
        try:
            with WorkerGroup(
                folder,
                2,
                "tests.support.hand_loops_inside:run",
                environment=PYTHONPATH_VARIABLE,
                starter=forks,
                heartbeat=100.0,
            ) as workers:
                workers.wait()
        except UniparError as e:
            (folder / "error").write_text(str(e), "utf-8")
        return folder

    def steps(strategy: str, name: str) -> Rows:
        folder = folder_of(strategy)
        rows = logged_steps(folder / name)
        assert len(rows) == STEPS, (folder / "error").read_text("utf-8")
        return rows

    return steps


def train_alone(task: unipar.Task, name: str, folder: Path) -> dict[str, torch.Tensor]:
    """Train a task in this process, as a run in the folder, and return the model's state at the end."""
    config = config_of(name, "single", "nothing", 1).model_dump(mode="json", exclude_unset=True)
    with running(task, folder, **config) as live:
        live.train()
        with live.whole() as model:
            return {key: value.clone() for key, value in model.state_dict().items()}


def assert_equal(rows: Rows, steps: list[Step]) -> None:
    """Assert that losses and rates are equal to six digits, norms nearly; groups with one rate are logged as one."""
    assert [row["loss"] for row in rows] == pytest.approx([step.loss for step in steps], rel=SIX_DIGITS)
    assert [row["norm"] for row in rows] == pytest.approx([step.norm for step in steps], rel=OF_NORMS)
    for row, step in zip(rows, steps, strict=True):
        one = len(set(step.rates)) == 1
        assert row["lr"] == pytest.approx(step.rates[0] if one else step.rates, rel=SIX_DIGITS)


@pytest.mark.parametrize("name", HAND_LOOPS)
def test_one_process(by_hand: LoopByHand, saved_model: Path, tmp_path: Path, name: str) -> None:
    """Each task in `single`."""
    train_alone(HAND_LOOPS[name].make_task(saved_model), name, tmp_path)
    assert_equal(logged_steps(tmp_path), by_hand(name))


@pytest.mark.parametrize(
    ("strategy", "name"),
    [
        pytest.param(strategy, name, marks=[] if (i + j) % len(STRATEGIES) == 0 else [pytest.mark.sweep])
        for i, strategy in enumerate(STRATEGIES)
        for j, name in enumerate(HAND_LOOPS)
    ],
)
def test_two_ranks(by_hand: LoopByHand, in_world: InWorld, strategy: str, name: str) -> None:
    """Each task in one of three strategies, and the sweeps play it in the other two."""
    assert_equal(in_world(strategy, name), by_hand(name))


def test_running_statistics(saved_model: Path, tmp_path: Path) -> None:
    """BatchNorm's running mean and variance at the end are those of the loop by hand."""
    name = "BatchNorm with augmentation"
    case = HAND_LOOPS[name]
    ours = train_alone(case.make_task(saved_model), name, tmp_path)
    _, model = case.by_hand(case.make_task(saved_model))
    statistics = {key: value for key, value in model.state_dict().items() if "running" in key}
    assert list(statistics) == ["1.running_mean", "1.running_var"]
    for key, value in statistics.items():
        assert torch.allclose(ours[key], value, rtol=SIX_DIGITS, atol=1e-7), key


@pytest.mark.sweep
def test_checkpointed_blocks_are_computed_again(saved_model: Path, tmp_path: Path) -> None:
    """A block of a model from `from_pretrained` is computed twice for each microbatch, as in the loop by hand."""
    name = "gradient checkpointing"
    case = HAND_LOOPS[name]
    ours: Any = case.make_task(saved_model)
    theirs: Any = case.make_task(saved_model)
    train_alone(ours, name, tmp_path)
    case.by_hand(theirs)
    assert (ours.computed, theirs.computed) == (48, 48)
