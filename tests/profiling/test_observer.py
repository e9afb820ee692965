"""Work of whole runs: the same count in every strategy, and a rank that waits for a slower one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.forks import Forks
from tests.support.running import Line
from unipar.backend import registry
from unipar.backend.checks import settle
from unipar.config import Config
from unipar.distributed.place import Place
from unipar.run_folder.heartbeat import HeartbeatWriter
from unipar.run_folder.layout import heartbeat_path, run_log_path
from unipar.run_folder.run_log import RunLog
from unipar.tracking.writer import TrackerWriter
from unipar.training.setup import build_run

pytestmark = pytest.mark.forked

TASK = """
import time
import torch
from torch import nn
import unipar

class Slow(unipar.Task):
    def __init__(self, busy=0.0): self.busy = busy
    def model(self): return nn.Sequential(*[nn.Sequential(nn.Linear(8, 8, bias=False)) for _ in range(2)])
    def data(self): return [torch.full((8,), i / 64) for i in range(64)]
    def weight(self, batch): return 3 * len(batch)
    def loss(self, model, batch):
        if torch.distributed.get_rank() == 1:
            until = time.thread_time() + self.busy
            while time.thread_time() < until:
                pass
        return model(batch).square().mean()
"""


def rows_of_ranks(forks: Forks, folder: Path, **keys: Any) -> list[list[dict[str, Any]]]:
    """The step events of two ranks in a run of three steps."""
    (folder / "slow.py").write_text(TASK, encoding="utf-8")
    config = {
        "task": {"use": "slow.py:Slow", "args": {"busy": 0.3}},
        "device": "cpu",
        "parallel": {"data": 2},
        "batch": {"total": 8, "micro": 2},
        "train": {"steps": 4, "optimizer": {"name": "sgd", "lr": 0.01}},
        "log": {"every": 1},
        **keys,
    }
    (folder / "slow.yaml").write_text(json.dumps(config), encoding="utf-8")
    done = forks.python(["-m", "unipar", "run", "slow.yaml", "--out", "out"], folder)
    assert done.returncode == 0, done.stderr
    return [[row for row in RunLog.read(run_log_path(folder / "out", r)) if row["event"] == "step"] for r in (0, 1)]


@pytest.mark.parametrize(
    "keys",
    [
        {"backend": "native"},
        {"backend": "horovod"},
        pytest.param({"backend": "native", "parallel": {"data": 2, "shard": "parameters"}}, marks=pytest.mark.sweep),
        pytest.param({"backend": "deepspeed", "parallel": {"data": 2, "shard": "gradients"}}, marks=pytest.mark.sweep),
        pytest.param({"backend": "accelerate"}, marks=pytest.mark.sweep),
    ],
    ids=lambda keys: "-".join(map(str, [keys["backend"], *keys.get("parallel", {}).values()])),
)
def test_a_slow_rank_is_waited_for(keys: dict[str, Any], tmp_path: Path, forks: Forks) -> None:
    """Rank 1 computes 0.3 s more in each of two microbatches: rank 0 waits for most of the step, and rank 1 does not.

    Eight samples through two matrices: 2 x 1024 operations in forward, and 3 x 1024 in backward, where the first
    layer's input needs no gradient.
    """
    fast, slow = rows_of_ranks(forks, tmp_path, **keys)
    assert (fast[0]["flops"], fast[0]["flops_by"]) == (5 * 1024, "in the first step, on all ranks")
    assert "waiting" not in fast[0]
    # a busy machine may hold one rank up in one step
    assert max(row["waiting"] for row in fast[1:]) > 0.6
    assert min(row["waiting"] for row in slow[1:]) < 0.3
    last = fast[-1]
    assert last["tokens_per_second"] == pytest.approx(3 * last["samples_per_second"])
    assert last["flops_per_second"] == pytest.approx(5 * 128 * last["samples_per_second"])


@pytest.mark.parametrize("counts", [True, False])
def test_operations_are_counted_if_they_are_asked_for(tmp_path: Path, counts: bool) -> None:
    """Rows of a run have them; a verification, which shows none, leaves them out: they take a third of its time."""
    config = {"backend": "single", "device": "cpu", "batch": {"total": 4}, "train": {"steps": 3}, "log": {"every": 1}}
    settled, backend = settle(Config.model_validate(config), 1), registry.find_backend("single")
    place = Place(rank=0, size=1, local_rank=0, local_size=1, launcher="unipar")
    world, heartbeat = backend.join(settled.config, place), HeartbeatWriter(heartbeat_path(tmp_path, 0))
    with RunLog(run_log_path(tmp_path, 0)) as run_log:
        trackers = TrackerWriter((), tmp_path, 0)
        live = build_run(
            settled, backend, Line(), world, run_log=run_log, heartbeat=heartbeat, trackers=trackers, counts=counts
        )
        live.task.train(live)
        live.finish()
    world.close()
    rows = [row for row in RunLog.read(run_log_path(tmp_path, 0)) if row["event"] == "step"]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert any("flops" in row for row in rows) is counts
