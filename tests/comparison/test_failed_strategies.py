"""Strategies that fail in a real comparison: what was measured before is kept, and the others go on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.comparisons import write_example_comparison
from unipar.comparison.compare import compare
from unipar.report.data.comparison_data import ComparisonPageData
from unipar.report.pages.comparison_page import render_comparison

pytestmark = pytest.mark.forked

TASK = '''
import os
import signal

import torch
from torch import nn
from torch.utils.data import TensorDataset
from typing_extensions import override

import unipar


class Dies(unipar.Task):
    """Task that asks for too much memory in step 6 with sharded gradients; with parameters, it is killed in step 9."""

    def model(self):
        return nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 1))

    def data(self):
        return TensorDataset(torch.randn(64, 512, generator=torch.Generator().manual_seed(1)))

    def train(self, run):
        self.run = run
        super().train(run)

    def loss(self, model, batch):
        y = model(batch[0]).square().mean()
        at = self.run.config.parallel.shard, self.run.done + 1, self.run.rank
        if at == ("gradients", 6, 1):
            torch.empty(2**45)
        if at == ("parameters", 9, 1):
            y.register_hook(lambda grad: os.kill(os.getpid(), signal.SIGKILL))
        return y
'''


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("till")
    (folder / "task.py").write_text(TASK, encoding="utf-8")
    told = {
        "task": {"use": f"{folder}/task.py:Dies"},
        "device": "cpu",
        "parallel": {"data": 2},
        "batch": {"total": 8},
        "model": {"blocks": "none"},
        "train": {"steps": 10},
        "out": str(folder / "out"),
    }
    whole = compare(told, strategies=("native/nothing", "native/gradients", "native/parameters"))
    data = json.loads((folder / "out/compare/compare.json").read_text("utf-8"))
    return {"table": whole.table(), "code": whole.code, "out": folder / "out"} | {
        c["strategy"]: c for c in data["strategies"]
    }


def test_a_strategy_that_the_kernel_kills_keeps_what_was_measured(found: dict[str, Any]) -> None:
    """Every byte of it, and the steps that were timed; the others run to their end."""
    row = found["native/parameters"]
    assert (row["outcome"], row["at"]) == ("failed", "in the backward of step 9")
    first, _ = row["note"].splitlines()
    assert first.startswith("rank 1 was killed by SIGKILL in the backward of step 9, from outside: by a person, a ")
    assert [len(turn) for turn in row["seconds"]] == [1]
    assert [account["rank"] for account in row["memory"]] == [0, 1]
    for account in row["memory"]:
        assert [phase["name"] for phase in account["phases"]] == ["built", "forward", "backward", "update", "steady"]
        assert all(sum(phase["held"].values()) == phase["peak"] > 0 for phase in account["phases"])
    assert [found[strategy]["outcome"] for strategy in ("single", "native/nothing")] == ["ran", "ran"]
    assert found["code"] == 1


def test_a_strategy_that_dies_while_it_is_watched_keeps_what_was_seen(found: dict[str, Any]) -> None:
    """The rank that failed writes down what it saw; its sums are whole."""
    row = found["native/gradients"]
    assert (row["outcome"], row["at"], row["seconds"]) == ("failed", "in the forward of step 6", [])
    assert row["note"].startswith("rank 1 ran out of memory in the forward of step 6: 131072 GiB more were requested")
    (account,) = (account for account in row["memory"] if account["rank"] == 1)
    by = {phase["name"]: phase for phase in account["phases"]}
    assert list(by) == ["built", "forward", "backward", "update", "steady"]
    assert all(sum(phase["held"].values()) == phase["peak"] > 0 for phase in by.values())
    assert by["update"]["held"]["optimizer"] > 1_000_000


def test_table_and_page_show_it_as_till_then(found: dict[str, Any]) -> None:
    """Beside the strategies that ran, and in no ranking."""
    lines = found["table"].splitlines()
    assert [line.split("  ")[0] for line in lines if "until it failed" in line] == [
        *("native/gradients, until it failed", "native/parameters, until it failed") * 2
    ]
    told = ComparisonPageData.read(Path(found["out"]))
    assert [strategy.strategy for strategy in told.failed_strategies] == ["native/gradients", "native/parameters"]
    assert "<caption>native/parameters, by phase, until it failed</caption>" in render_comparison(told)


def test_a_strategy_that_failed_is_shown_till_then(tmp_path: Path) -> None:
    """Its figures are shown apart, and it is in no ranking."""
    run = write_example_comparison(tmp_path / "run")
    file = run / "compare/compare.json"
    data = json.loads(file.read_text("utf-8"))
    row = next(row for row in data["strategies"] if row["strategy"] == "native/parameters")
    row |= {"outcome": "failed", "note": "rank 1 was killed\nits log", "at": "in the backward of step 7"}
    file.write_text(json.dumps(data), encoding="utf-8")
    told = ComparisonPageData.read(run)
    text = render_comparison(told)
    assert [strategy.strategy for strategy in told.failed_strategies] == ["native/parameters"]
    assert "native/parameters" not in [strategy.strategy for strategy in told.measured_strategies]
    assert "native/parameters failed in the backward of step 7: rank 1 was killed</p>" in text
    assert "<caption>native/parameters, by phase, until it failed</caption>" in text
