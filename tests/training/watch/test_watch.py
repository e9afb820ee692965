"""Faults that are planted into a running training, and what `train.consistency_check` says at its next look."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.support.forks import Forks
from tests.support.world import ROOT
from unipar.launcher.processes.group import WorkerGroup

pytestmark = pytest.mark.forked

WAY_OUT = "`unipar verify` on this config compares the strategy with one process and names the place"
FOUND = {
    "none": "",
    "weights": "rank 1: embed.weight has other values here than on rank 0, and both should hold the same: gradients "
    "were not reduced over all ranks, or something changes weights on one rank alone; ",
    "norm": "rank 0: the optimizer got gradients with a norm of 2.4, and the norm that is reported is {norm}, which "
    "train.clip (0.3) makes 0.3: they were scaled, clipped or reduced in another way than the norm says; ",
    "rate": "rank 0: the optimizer took the step at the learning rate 0.2 in its group 0, where the group's own rate "
    "and the schedule say 0.1: something else sets the rate (a scheduler of the library's, or of the task's); ",
    "update": "rank 0: the update left embed.weight as it was, though its gradient's norm is {gradient} and its "
    "learning rate 0.1: the step had no effect, or is too small for float32; ",
    "no update": "rank 0: the optimizer took no step, and did before; ",
    "dtype": "rank 0: embed.weight was made in float32, and the optimizer's momentum_buffer of it is kept in bfloat16: "
    "small updates are lost; ",
    "parameter": "rank 0: the optimizer did not update embed.weight: it has no gradient of it, or does not have it at "
    "all; ",
    "samples": "rank 0: the ranks of part 1 of the batch trained on the samples of part 0: both have read the same "
    "data; ",
}
NUMBERS = {
    "native/nothing": {"norm": "0.4975", "gradient": "0.0396"},
    "native/parameters": {"norm": "0.4975", "gradient": "0.0335"},  # of rank 0's rows
    "deepspeed/gradients": {"norm": "0.4975", "gradient": "0.0396"},
    "horovod/nothing": {
        "norm": "0.5011",
        "gradient": "",
    },  # it calls the hook twice in step 5
}
WORLDS = {
    "native/nothing": [
        "none", "weights", "norm", "rate", "update", "no update", "dtype", "parameter", "samples",
    ],
    "native/parameters": ["none", "norm", "rate", "update", "dtype", "samples"],
    "deepspeed/gradients": ["none", "norm", "rate", "update", "dtype", "samples"],
    "horovod/nothing": ["none", "weights", "norm", "rate"],
}  # fmt: skip


@pytest.mark.parametrize("strategy", WORLDS)
def test_faults_are_found(strategy: str, tmp_path: Path, forks: Forks) -> None:
    """Each within one interval, on all ranks in the same words: the rank, the step, the weight, the numbers."""
    (tmp_path / "faults.json").write_text(json.dumps([(strategy, fault) for fault in WORLDS[strategy]]), "utf-8")
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    with (
        forks.instead(),
        WorkerGroup(tmp_path, 2, "tests.support.watched_inside:run", environment={"PYTHONPATH": path}) as workers,
    ):
        workers.wait()
    first, second = (json.loads((tmp_path / f"told-{rank}.json").read_text("utf-8")) for rank in (0, 1))
    assert first == second
    expected = {fault: FOUND[fault].format(**NUMBERS[strategy]) for fault in WORLDS[strategy]}
    found = dict(zip(WORLDS[strategy], first, strict=True))
    assert found == {
        fault: sentence and f"train.consistency_check: at step 6, {sentence}{WAY_OUT}"
        for fault, sentence in expected.items()
    }
