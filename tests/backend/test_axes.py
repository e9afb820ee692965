"""Strategies with axes beside the data's: ranks that train on the same samples count once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.forks import Forks
from unipar.backend.checks import check_can_run
from unipar.backend.offered_strategies import config_in_strategy
from unipar.config import Config, Strategy
from unipar.errors import ConfigError, Unsupported

TOY = Path(__file__).parents[1] / "support" / "toy"

TASK = '''
import torch
from torch import nn
import unipar


class Words(unipar.Task):
    """Sentences of several lengths, weighed by their words, with dropout."""

    def model(self):
        return nn.Sequential(nn.Embedding(7, 8), nn.Dropout(0.2), nn.Linear(8, 7))

    def data(self):
        made = torch.Generator().manual_seed(0)
        return [torch.randint(0, 7, (int(n),), generator=made) for n in torch.randint(2, 9, (44,), generator=made)]

    def validation(self):
        return self.data()[:13]

    def collate(self, samples):
        return nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=-1)

    def loss(self, model, batch):
        words = batch.clamp(min=0)
        return nn.functional.cross_entropy(model(words)[:, :-1].flatten(0, 1), batch[:, 1:].flatten(), ignore_index=-1)

    def weight(self, batch):
        return float((batch[:, 1:] >= 0).sum())
'''

STEPS = {"steps": 1}

STRATEGIES = (
    "toy/nothing",
    "toy/nothing+tensor2",
    "toy/nothing+pipeline2",
    "toy/nothing+context2",
    "toy/nothing+tensor3",
)


@pytest.mark.sweep
def test_all_axes_train_the_same(forks: Forks, tmp_path: Path) -> None:
    """Weighed and ragged batches, dropout and evaluation, on two ranks; sizes that do not divide are refused."""
    (tmp_path / "task.py").write_text(TASK, encoding="utf-8")
    config = {
        "task": {"use": "task.py:Words"},
        "backend": "toy",
        "device": "cpu",
        "parallel": {"data": 2},
        "batch": {"total": 16, "micro": 4},
        "train": {"steps": 12, "optimizer": {"lr": 0.05}, "clip": 0.5},
        "out": "out",
    }
    (tmp_path / "c.yaml").write_text(json.dumps(config), encoding="utf-8")
    words = [word for strategy in STRATEGIES for word in ("--strategy", strategy)]
    done = forks.python(
        ("-m", "unipar", "compare", "c.yaml", *words), tmp_path, {"PYTHONPATH": str(TOY), "COLUMNS": "120"}
    )
    rows: list[dict[str, Any]] = json.loads((tmp_path / "out/compare/compare.json").read_text("utf-8"))["strategies"]
    found = {row["strategy"]: row for row in rows}
    one = found["single"]["losses"]
    for strategy in STRATEGIES[:4]:
        assert found[strategy]["outcome"] == "ran", (found[strategy]["note"], done.stderr[-2000:])
        assert found[strategy]["losses"] == pytest.approx(one, rel=2e-6)
    assert (
        found["toy/nothing+tensor3"]["note"]
        == "toy/nothing+tensor3 needs a multiple of 3 ranks (tensor 3), and there are 2"
    )


def test_a_run_on_four_ranks(forks: Forks, tmp_path: Path) -> None:
    """Two parts of the data, each trained by two ranks: losses and metrics are those of one process."""
    (tmp_path / "task.py").write_text(TASK, encoding="utf-8")
    ends: list[list[float]] = []
    for name, changes in {
        "one": {"backend": "single", "parallel.data": 1},
        "four": {"backend": "toy", "parallel.data": 2, "parallel.tensor": 2},
    }.items():
        sets = [f"--set={key}={value}" for key, value in changes.items()]
        config = {
            "task": {"use": "task.py:Words"},
            "device": "cpu",
            "batch": {"total": 16, "micro": 4},
            "train": {"steps": 4, "optimizer": {"lr": 0.05}},
            "eval": {"every": 2},
            "log": {"every": 1},
            "out": name,
        }
        (tmp_path / "c.yaml").write_text(json.dumps(config), encoding="utf-8")
        done = forks.python(("-m", "unipar", "run", "c.yaml", *sets), tmp_path, {"PYTHONPATH": str(TOY)})
        assert done.returncode == 0, done.stderr[-2000:]
        run_log = [json.loads(line) for line in (tmp_path / name / "rank-0.jsonl").read_text("utf-8").splitlines()]
        ends.append([row["loss"] for row in run_log if row["event"] in ("step", "eval")])
    assert len(ends[0]) == 6
    assert ends[1] == pytest.approx(ends[0], rel=2e-6)


@pytest.mark.parametrize(
    ("backend", "sizes", "why"),
    [
        (
            "single",
            {"tensor": 2},
            "single: parallel.tensor: 2 is not available here, only in accelerate/nothing, accelerate/gradients, "
            "accelerate/parameters, deepspeed/nothing, deepspeed/optimizer, deepspeed/gradients, "
            "deepspeed/parameters, native/nothing, native/optimizer, native/gradients, native/parameters",
        ),
        (
            "horovod",
            {"pipeline": 2, "schedule": "gpipe"},
            "horovod/nothing+pipeline2+gpipe: parallel.pipeline: 2 is not available here, only in native/nothing, "
            "native/optimizer, native/gradients, native/parameters: Horovod sums tensors over ranks and has no part "
            "that splits a model",
        ),
    ],
)
def test_backends_without_axes(backend: str, sizes: dict[str, Any], why: str) -> None:
    """A key that a backend cannot follow is refused, not ignored."""
    config = Config.model_validate(
        {"backend": backend, "batch": {"total": 4}, "parallel": {"data": 1, **sizes}, "train": STEPS}
    )
    with pytest.raises(Unsupported) as e:
        check_can_run(config)
    assert str(e.value) == why


def test_a_config_in_a_strategy_with_axes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks in all and the global batch stay; fewer parts of the data take more microbatches each."""
    monkeypatch.syspath_prepend(TOY)
    config = Config.model_validate(
        {"backend": "toy", "batch": {"micro": 3, "accumulate": 2}, "parallel": {"data": 4}, "train": STEPS}
    )
    moved = config_in_strategy(config, Strategy.parse("toy/nothing+tensor2"))
    assert (moved.parallel.data, moved.parallel.tensor, moved.parallel.ranks) == (2, 2, 4)
    assert moved.batch.settle(2).accumulate == 4
    assert config_in_strategy(moved, Strategy.parse("toy")).batch.settle(4).accumulate == 2
    with pytest.raises(ConfigError) as e:
        config_in_strategy(config, Strategy.parse("toy/nothing+tensor3"))
    assert str(e.value) == "toy/nothing+tensor3 needs a multiple of 3 ranks (tensor 3), and there are 4"
