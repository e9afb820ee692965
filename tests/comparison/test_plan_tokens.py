"""Plans of batches by tokens: the largest microbatches, equal to plans by samples where all samples are alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from typing_extensions import override

import unipar
from tests.conformance.lengths import Counted
from unipar.comparison.pick import write_picked_config
from unipar.config.config_source import load_config_file
from unipar.errors import ConfigError
from unipar.training.fake_run.token_traces import TokenTraces

BATCH = {"tokens": 70, "max_length": 8, "micro": 20}


class Equal(Counted):
    """Samples of six tokens each."""

    @override
    def data(self) -> Any:
        return [(torch.arange(9) + i, 6) for i in range(48)]


class OneLong(Counted):
    """Samples of two tokens, and one of eight."""

    @override
    def data(self) -> Any:
        return [(torch.arange(9), 8 if i == 7 else 2) for i in range(64)]


def _config(name: str, batch: dict[str, Any]) -> dict[str, Any]:
    return {
        "task": {"use": f"{__file__}:{name}"},
        "device": "cpu",
        "batch": batch,
        "train": {"steps": 1, "optimizer": {"name": "adamw", "lr": 0.01}},
    }


def _peaks(
    config: dict[str, Any], strategies: list[str], worlds: list[int]
) -> dict[tuple[str, int], list[tuple[str, int]]]:
    planned = unipar.plan(config, strategies=strategies, worlds=worlds)
    return {(row.strategy, row.ranks): [(p.phase, p.peak) for p in row.phases] for row in planned.rows}


@pytest.mark.parametrize("rows", ["padded", "packed"])
def test_equal_samples_need_what_they_do_by_number(rows: str) -> None:
    """24 tokens in samples of six are four samples, in every phase of each strategy."""
    strategies, worlds = ["native/nothing", "native/parameters", "deepspeed/gradients"], [1, 2]
    tokens = _peaks(_config("Equal", {"tokens": 96, "micro": 24, "rows": rows}), strategies, worlds)
    assert len(tokens) == 6
    assert tokens == _peaks(_config("Equal", {"total": 16, "micro": 4}), strategies, worlds)


def test_the_larger_of_two_microbatches() -> None:
    """One sample of eight tokens needs less than ten of two, which need more than three."""
    (wide,) = _peaks(_config("OneLong", {"tokens": 40, "micro": 20}), ["native/nothing"], [1]).values()
    (narrow,) = _peaks(_config("OneLong", {"tokens": 40, "micro": 8}), ["native/nothing"], [1]).values()
    assert dict(wide)["forward"] > dict(narrow)["forward"]
    plan = unipar.plan(_config("OneLong", {"tokens": 40, "micro": 20}), strategies=["native/nothing"], worlds=[1, 2])
    assert [note for note in plan.notes if note.startswith("largest microbatches")] == [
        "largest microbatches with data 1: 2 x 8 tokens, the longest samples, and 10 x 2, the fullest of the first "
        "epoch; the plan takes what needs more",
        "largest microbatches with data 2: 2 x 8 tokens, the longest samples, and 10 x 2, the fullest of the first "
        "epoch; the plan takes what needs more",
    ]


def test_a_plan_within_a_limit_counts_tokens(tmp_path: Path) -> None:
    """The largest microbatch is told in tokens, and `--pick` writes it in the place of what the config says."""
    file = tmp_path / "tokens.yaml"
    batch = "{tokens: 96, accumulate: 1}"
    file.write_text(f"task: {{use: '{__file__}:Equal'}}\ndevice: cpu\nbatch: {batch}\ntrain: {{steps: 1}}\n")
    whole = unipar.plan(str(file), strategies=["native/nothing"], worlds=[1])
    assert whole.rows[0].micro == 96
    least = unipar.plan(str(file), strategies=["native/nothing"], worlds=[1], memory=10**9).rows[0]
    assert least.largest == 96
    short = unipar.plan(
        str(file), strategies=["native/nothing"], worlds=[1], memory=whole.rows[0].needed, headroom=0.02
    )
    largest = short.rows[0].largest
    assert largest is not None
    assert 6 <= largest < 96
    assert "largest micro: the most tokens a microbatch that do" in short.table(300)
    write_picked_config(short, load_config_file(file), tmp_path / "picked.yaml")
    batch = load_config_file(tmp_path / "picked.yaml").config.batch
    assert (batch.tokens, batch.micro, batch.accumulate) == (96, largest, None)
    write_picked_config(whole, load_config_file(file), tmp_path / "kept.yaml")
    batch = load_config_file(tmp_path / "kept.yaml").config.batch
    assert (batch.tokens, batch.micro, batch.accumulate) == (96, None, 1)


def test_seconds_are_those_of_a_mean_step() -> None:
    """Tokens a second on a machine count tokens without padding, of which the last batch of an epoch has fewer."""
    plan = unipar.plan(
        _config("Equal", {"tokens": 90, "micro": 24}), strategies=["native/nothing"], worlds=[2], machine="l4"
    )
    assert plan.units == "tokens"
    speed = plan.rows[0].speed
    assert speed is not None
    assert speed.units == pytest.approx(48 * 6 / 4)  # four steps an epoch: 90, 90, 90 and 18 tokens
    assert "tokens/s" in plan.table(300)


def test_a_sample_that_is_too_long() -> None:
    """A plan refuses it by its index, as a run does."""
    with pytest.raises(ConfigError) as e:
        unipar.plan(_config("OneLong", {"tokens": 40, "micro": 20, "max_length": 4}), strategies=["single"])
    assert str(e.value) == (
        "batch.max_length: 4: sample 7 of data() has 8 tokens, more than that; cut or leave out such samples in the "
        "dataset, or raise batch.max_length to the longest one's 8"
    )


def test_each_length_is_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of ranks and strategies share the steps of samples of one length."""
    made: list[TokenTraces] = []
    init = TokenTraces.__init__

    def keep(self: TokenTraces, *given: Any) -> None:
        init(self, *given)
        made.append(self)

    monkeypatch.setattr(TokenTraces, "__init__", keep)
    unipar.plan(_config("OneLong", {"tokens": 40, "micro": 20}), strategies=["native/*"], worlds=[1, 2, 4])
    assert len(made) == 1
    assert made[0].lengths == [2, 8]
