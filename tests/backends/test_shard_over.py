"""native with `parallel.shard_over: machine`: really trained, in a world whose ranks pretend to be on two machines."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.conformance import tasks
from tests.support.placed_inside import Placed, train_placed
from unipar.backend.checks import settle
from unipar.prediction.request import PredictionRequest
from unipar.training.fake_run.task_traces import TaskTraces

pytestmark = pytest.mark.forked

MACHINE = {"shard_over": "machine"}
FP64 = {"clip": {"max": 0.3, "norm": "fp64"}}
JOBS = {
    "over all ranks": Placed("native/parameters", "abab"),
    "parameters": Placed("native/parameters", "abab", MACHINE),
    "gradients": Placed("native/gradients", "abba", MACHINE, FP64),
    "optimizer": Placed("native/optimizer", "aabb", MACHINE),
    "one machine": Placed("native/optimizer", "aaaa", MACHINE),
    "context": Placed("native/parameters+context2", "aabb", MACHINE),
    "pipeline": Placed("native/parameters+pipeline2", "aabb", MACHINE),
    "by number": Placed("native/parameters", "aabb", {"shard_over": 2}),
    "DDP": Placed("native/nothing", "abab"),
    "unequal": Placed("native/parameters", "aaab", MACHINE),
}
ALWAYS = ("over all ranks", "parameters", "one machine", "pipeline", "unequal")
"""Jobs that are played whenever tests run; the others are in the sweeps."""

Said = dict[str, list[dict[str, Any]]]


def each(*names: str) -> list[Any]:
    """Return jobs as parameters of a test."""
    return [pytest.param(name, marks=[] if name in ALWAYS else [pytest.mark.sweep]) for name in names]


@pytest.fixture(scope="module")
def said(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Said:
    folder = tmp_path_factory.mktemp("placed")
    calls = (getattr(item, "callspec", None) for item in request.session.items)
    asked = {*ALWAYS, *(call.params.get("name") for call in calls if call is not None)}
    jobs = {name: job for name, job in JOBS.items() if name in asked}
    ranks = train_placed(list(jobs.values()), folder / "four")
    alone = train_placed([Placed("single", "a")], folder / "one")
    return {**dict(zip(jobs, ranks, strict=True)), "single": alone[0]}


def losses(ranks: list[dict[str, Any]]) -> list[float]:
    """Sum of the ranks' shares at each step."""
    return [sum(shares) for shares in zip(*(rank["loss"] for rank in ranks), strict=True)]


@pytest.mark.parametrize(
    "name", each("over all ranks", "parameters", "gradients", "optimizer", "one machine", "pipeline")
)
def test_same_losses(name: str, said: Said) -> None:
    """Those of one process."""
    assert losses(said[name]) == pytest.approx(losses(said["single"]), abs=2e-6, rel=0)


@pytest.mark.parametrize("name", each(*(name for name in JOBS if name != "unequal")))
def test_bytes_are_those_planned(name: str, said: Said) -> None:
    """By axis and collective, of the rank that sends most, and between machines."""
    job, ranks = JOBS[name], said[name]
    per = 2 if "b" in job.machines else 4
    sizes = settle(job.config, 4).sizes
    traces = TaskTraces(job.config, sizes.micro, tasks.Grouped())
    sent = traces.predict(PredictionRequest(job.config, 4, sizes, "cpu", per)).sent
    by: Counter[tuple[str, str]] = Counter()
    for volume in sent:
        by[volume.axis, volume.collective] += volume.size
    assert max((rank["sent"] for rank in ranks), key=lambda each: sum(each.values())) == by
    assert max(rank["across"] for rank in ranks) == sum(volume.across for volume in sent)
    assert (sum(volume.across for volume in sent) > 0) is (name != "one machine")


def test_less_crosses_than_over_all_ranks(said: Said) -> None:
    """Only reduced gradients of the shards: nothing is gathered from another machine."""
    across = {name: said[name][0]["across"] for name in ("over all ranks", "parameters", "one machine")}
    gradients = said["parameters"][0]["sent"]["data", "reduce_scatter"] // 2
    assert across == {"over all ranks": 102968, "parameters": gradients, "one machine": 0}
    assert gradients == 16896


def test_pieces_of_one_machine(said: Said) -> None:
    """A checkpoint gets each element once, from the ranks on rank 0's machine: 0 and 2."""
    assert [bool(rank["pieces"]) for rank in said["parameters"]] == [True, False, True, False]
    held: Counter[str] = Counter()
    whole: dict[str, int] = {}
    for rank in said["parameters"]:
        for name, (_, length, _, runs), shape in rank["pieces"]:
            held[name] += length * runs
            whole[name] = 1
            for size in shape:
                whole[name] *= size
    assert dict(held) == whole


def test_unequal_machines(said: Said) -> None:
    """Every rank says the same, before the first step."""
    sentence = (
        "parallel.shard_over: machine: a has 3 ranks, b has 1 rank, and copies can be split only over equal numbers: "
        "start as many ranks on each machine, or leave shard_over out, so that all ranks split one copy"
    )
    assert said["unequal"] == 4 * [{"error": "ConfigError", "message": sentence}]
