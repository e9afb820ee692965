"""What a plan says of machines: over how many ranks a copy is split, and which bytes cross between machines."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

import unipar
from tests.support.short_text import short_text
from unipar.config import Config
from unipar.errors import ConfigError
from unipar.prediction.ranks_of_machines import count_across, settle_shard_over
from unipar.prediction.timeline import CommVolume

TEXT: dict[str, Any] = {"task": short_text(), "device": "cpu", "batch": {"total": 16}, "train": {"steps": 1}}


def config(**parallel: Any) -> Config:
    made = {"shard": "parameters", **parallel}
    return Config.model_validate({"batch": {"total": 16}, "train": {"steps": 1}, "parallel": made})


@pytest.mark.parametrize(
    ("parallel", "ranks", "per", "over"),
    [
        ({}, 16, 4, 4),
        ({}, 4, 8, 4),
        ({"tensor": 2}, 16, 8, 4),
        ({"context": 2}, 16, 8, 4),
        ({"context": 2}, 16, 2, 1),  # the ranks of a sequence split a copy by themselves
        ({"pipeline": 2}, 16, 4, 4),
        ({"pipeline": 2}, 16, 16, 8),
    ],
)
def test_ranks_of_the_data_that_split_a_copy(parallel: dict[str, int], ranks: int, per: int, over: int) -> None:
    """Those of a machine, of which one is filled after another."""
    given = config(shard_over="machine", **parallel)
    assert settle_shard_over(given, ranks, per).parallel.shard_over == over
    assert settle_shard_over(config(shard_over=2), ranks, per).parallel.shard_over == 2


def test_machines_must_be_known() -> None:
    """A plan does not look at the machines of a job that has not started; what a run refuses it refuses as well."""
    given = config(shard_over="machine")
    with pytest.raises(ConfigError) as unknown:
        settle_shard_over(given, 16, None)
    assert str(unknown.value) == (
        "parallel.shard_over: machine: a plan must know how many ranks a machine has: say machines.ranks_per_node "
        "(--set machines.ranks_per_node=8), or name a --machine"
    )
    with pytest.raises(ConfigError) as unequal:
        settle_shard_over(given, 12, 8)
    assert str(unequal.value) == (
        "parallel.shard_over: machine: machine 1 has 8 ranks, machine 2 has 4 ranks, and copies can be split only over "
        "equal numbers: start as many ranks on each machine, or leave shard_over out, so that all ranks split one copy"
    )


@pytest.mark.parametrize(
    ("axes", "volume", "per", "across"),
    [
        ({}, CommVolume("data", "all_reduce", 10, 1, 8), 4, 10),
        ({}, CommVolume("data", "all_reduce", 10, 1, 8), 8, 0),
        ({}, CommVolume("data", "all_reduce", 10, 1, 8), None, 0),
        ({}, CommVolume("data", "all_gather", 10, 1, 4), 4, 0),
        ({}, CommVolume("data", "all_gather", 10, 1, 4), 2, 10),
        ({}, CommVolume("data", "all_reduce", 10, 1, 2, stride=4), 4, 10),
        ({}, CommVolume("data", "all_reduce", 10, 1, 4, stride=2), 4, 10),
        ({"tensor": 2}, CommVolume("tensor", "all_reduce", 10, 1, 2), 4, 0),
        ({"tensor": 2}, CommVolume("tensor", "all_reduce", 10, 1, 2), 1, 10),
        ({"tensor": 2}, CommVolume("data", "all_gather", 10, 1, 4), 4, 10),
        ({"tensor": 2}, CommVolume("data", "all_gather", 10, 1, 2), 4, 0),
        ({"tensor": 2}, CommVolume("all ranks", "all_reduce", 10, 1, 8), 4, 10),
        ({"context": 2}, CommVolume("data x context", "all_gather", 10, 1, 4), 4, 0),
        ({"context": 2}, CommVolume("data", "all_reduce", 10, 1, 2, stride=2), 4, 10),
        ({"pipeline": 4}, CommVolume("pipeline", "send", 10, 1, 4), 4, 10),
        ({"pipeline": 4}, CommVolume("pipeline", "all_reduce", 10, 1, 2, stride=3), 4, 10),
        ({"pipeline": 4}, CommVolume("data", "all_reduce", 10, 1, 2), 4, 0),
    ],
)
def test_bytes_between_machines(axes: dict[str, int], volume: CommVolume, per: int | None, across: int) -> None:
    """All bytes of collectives whose ranks are on several machines, in a world of eight."""
    (found,) = count_across([volume], config(**axes), 8, per)
    assert found.across == across


def test_of_the_rank_that_has_most() -> None:
    """Three machines of two: the copies of four ranks are on two machines or on one and a half."""
    sent = CommVolume("data", "all_gather", 10, 1, 3), CommVolume("data", "all_reduce", 5, 1, 2, stride=3)
    assert [each.across for each in count_across(sent, config(), 6, 2)] == [10, 5]


def planned(more: dict[str, Any]) -> Any:
    given = TEXT | {"parallel": {"shard_over": "machine"}} | more
    return unipar.plan(given, strategies=["native/nothing", "native/parameters"], worlds=[4])


@pytest.mark.parametrize("machines", [{"nodes": 2}, {"ranks_per_node": 2}])
def test_plan_of_two_machines(machines: dict[str, int]) -> None:
    """The config's `machines` say how many ranks one has: DDP sends all between them, and copies reduced gradients."""
    found = planned({"machines": machines})
    plain, split = found.rows
    assert plain.sent_across == plain.sent_bytes > 0
    assert split.sent_across == next(volume.size for volume in split.sent if volume.stride == 2) > 0
    table = found.table(100)
    assert "sent  between machines" in table
    assert "between machines: those of collectives whose ranks are on several machines" in table
    sent = json.loads(found.as_json())["rows"][1]["sent"]
    assert [(volume["stride"], volume["across"] > 0) for volume in sent] == [
        (1, False),
        (1, False),
        (2, True),
        (1, False),
    ]


def test_plan_of_one_machine() -> None:
    """Nothing goes anywhere else, and nothing is said of it."""
    found = planned({"machines": {"ranks_per_node": 4}})
    assert [row.sent_across for row in found.rows] == [0, 0]
    assert "between machines" not in found.table(100)


def test_plan_of_unknown_machines() -> None:
    """The strategy that needs to know is refused, and the others are planned."""
    plain, split = planned({}).rows
    assert plain.refusal == ""
    assert split.refusal.startswith("parallel.shard_over: machine: a plan must know how many ranks a machine has: say ")


def test_a_large_world_takes_as_long_as_it_has_ranks() -> None:
    """Each group is looked at once: 4,096 ranks take no second, and not 16 million looks."""
    began = time.process_time()
    (found,) = count_across([CommVolume("data", "all_reduce", 10, 1, 4_096)], config(), 4_096, 8)
    assert found.across == 10
    assert time.process_time() - began < 5
