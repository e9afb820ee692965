"""Blocks that are recomputed so that a rank's planned peak fits: how many, which, and who says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from typing_extensions import override

import unipar
from tests.support.running import running
from unipar.backend.checks import settle
from unipar.cli.commands.config.explain import explain_config
from unipar.config import Config
from unipar.config.config_source import load_given_config
from unipar.errors import ConfigError
from unipar.planning.recompute_choice import RecomputeChoice
from unipar.run_folder.layout import run_log_path
from unipar.run_folder.run_log import RunLog
from unipar.training.fake_run.recompute_fit import choose_for_run, find_fewest


class Block(nn.Module):
    """Block that counts its forward calls and saves much."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.calls = nn.Linear(64, 256), nn.Linear(256, 64), 0

    @override
    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.down(self.up(x).sin())


class Deep(unipar.Task):
    """Task whose model has eight such blocks."""

    @override
    def model(self) -> nn.Module:
        return nn.Sequential(*(Block() for _ in range(8)))

    @override
    def data(self) -> Any:
        return TensorDataset(torch.randn(64, 128, 64))

    @override
    def loss(self, model: Any, batch: Any) -> Tensor:
        return model(batch[0]).square().mean()


class Several(Deep):
    """Task of two parts."""

    @override
    def model(self) -> Any:
        return {"one": super().model(), "other": super().model()}


def config(fit: str, task: str = "Deep", **sections: Any) -> dict[str, Any]:
    made: dict[str, Any] = {
        "task": {"use": f"{__file__}:{task}"},
        "device": "cpu",
        "batch": {"total": 8, "micro": 4},
        **sections,
    }
    return {**made, "train": {"steps": 2}, "model": {"recompute": {"fit": fit}, **made.get("model", {})}}


def choose(fit: str, **sections: Any) -> RecomputeChoice:
    return choose_for_run(settle(Config.model_validate(config(fit, **sections)), 1))


@pytest.mark.parametrize(("curve", "fewest", "calls"), [(1.0, 43, 2), (0.5, 66, 4), (3.0, 17, 6)])
def test_few_numbers_are_tried(curve: float, fewest: int, calls: int) -> None:
    """Along a line two plans suffice beside those of none and all; along a curve some more."""
    tried: list[int] = []

    def needed(count: int) -> int:
        tried.append(count)
        return 1000 - round(700 * (count / 100) ** (1 / curve) if curve < 1 else 700 * (1 - (1 - count / 100) ** curve))

    assert needed(fewest) <= 702 < needed(fewest - 1)
    tried.clear()
    assert find_fewest(needed, 100, 702, 1000, 300) == (fewest, needed(fewest))
    assert len(tried) - 1 == calls


def test_as_few_as_needed() -> None:
    """The first ones; with one less the plan is beyond the limit, which a choice of all or none shows."""
    choice = choose("9.5MiB")
    assert choice.says == "6 of 8 blocks recomputed (0 to 5): 9.2 MiB of 9.5 MiB by the plan, 15 MiB with none"
    assert choice.names == ("0", "1", "2", "3", "4", "5")
    assert choose("9MiB").names == ("0", "1", "2", "3", "4", "5", "6")
    assert choose("15MiB").says == "1 of 8 blocks recomputed (0): 14 MiB of 15 MiB by the plan, 15 MiB with none"
    assert choose("1GiB").says == "no block recomputed: 15 MiB of 1.0 GiB by the plan"
    assert choose("1GiB").recompute == "none"


def test_a_run_recomputes_what_was_chosen(tmp_path: Path) -> None:
    """Blocks run twice in a microbatch if they are chosen, once if not; the run log has their names."""
    with running(Deep(), tmp_path, batch={"total": 4, "micro": 4}, model={"recompute": {"fit": "9MiB"}}) as run:
        run.task.train(run)
        module: Any = run.parts["model"].module
        assert [block.calls for block in module] == [6, 6, 6, 3, 3, 3, 3, 3]
    (note,) = (row for row in RunLog.read(run_log_path(tmp_path, 0)) if row["event"] == "recomputed blocks")
    assert note["names"] == ["0", "1", "2"]


def test_random_numbers_are_as_without(tmp_path: Path) -> None:
    """The plan draws none of those that the model's values come from."""
    states: list[Tensor] = []
    for number, recompute in enumerate(("blocks", {"fit": "9MiB"})):
        torch.manual_seed(5)
        (tmp_path / str(number)).mkdir()
        with running(Deep(), tmp_path / str(number), model={"recompute": recompute}) as run:
            states.append(run.parts["model"].module.state_dict()["0.up.weight"].clone())
    assert torch.equal(states[0], states[1])


def test_a_plan_says_what_each_strategy_recomputes() -> None:
    """Of strategies that need less, fewer blocks; one that cannot is refused."""
    plan = unipar.plan(config("10MiB"), strategies=["native/nothing", "native/parameters"], worlds=[2])
    assert [row.recomputed.partition(" blocks")[0] for row in plan.rows] == ["5 of 8", "4 of 8"]
    assert all(row.peak.peak <= 10 * 2**20 for row in plan.rows)
    assert f"native/parameters on 2: {plan.rows[1].recomputed}" in plan.notes
    (row,) = unipar.plan(config("1MiB"), strategies=["native/nothing"], worlds=[2]).rows
    assert row.refusal.startswith("model.recompute: {fit: 1.0 MiB} is not reached")


def test_explain_names_them() -> None:
    """With --deep, as they depend on the model."""
    explained = explain_config(load_given_config(config("9.5MiB", parallel={"data": 1})), deep=True)
    (value,) = (v for s in explained.strategies for v in s.axes if v.key == "recomputed blocks")
    assert value.value == ["0", "1", "2", "3", "4", "5"]
    assert value.origin.startswith("derived: 6 of 8 blocks recomputed (0 to 5)")


def test_what_cannot_be_reached() -> None:
    """The sentence has the numbers, and each way out that is one."""
    with pytest.raises(ConfigError) as e:
        choose("2MiB", parallel={"data": 1})
    assert str(e.value) == (
        "model.recompute: {fit: 2.0 MiB} is not reached: with all of 8 blocks recomputed a rank of native/nothing "
        "needs 8.2 MiB by the plan, 6.2 MiB more (15 MiB with none recomputed); lower batch.micro (4), split "
        "parameters (parallel.shard: parameters), or raise fit"
    )


def test_several_parts_have_no_plan(tmp_path: Path) -> None:
    """A plan has one model."""
    with pytest.raises(ConfigError) as e, running(Several(), tmp_path, model={"recompute": {"fit": "9MiB"}}):
        pass
    assert str(e.value) == (
        "model.recompute: {fit: 9.0 MiB} chooses blocks by a plan, and there is none: plan: model() returned several "
        "parts (one, other), and a plan has one model: measure it (unipar compare); say recompute: blocks, or none"
    )


def test_names_of_blocks(tmp_path: Path) -> None:
    """Those named are recomputed; a name that no block has is refused."""
    with running(Deep(), tmp_path, model={"recompute": ["0", "[67]"]}, batch={"total": 4}) as run:
        run.step(next(run.batches()))
        module: Any = run.parts["model"].module
        assert [block.calls for block in module] == [2, 1, 1, 1, 1, 1, 2, 2]
    with pytest.raises(ConfigError) as e, running(Deep(), tmp_path, model={"recompute": ["9"]}):
        pass
    assert str(e.value) == "model.recompute: no block of the model is called '9'; it has 0, 1, 2, 3, 4, 5, 6, 7"
