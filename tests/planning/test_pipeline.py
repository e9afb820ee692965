"""Order of microbatches on the stages of a pipeline, and its bubble."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble
from torch.testing._internal.distributed.fake_pg import FakeStore

from unipar.config.sections.strategy import Axes, PipelineSchedule
from unipar.planning.pipeline_order import (
    bubble,
    describe_bubble,
    microbatch_order,
    microbatches_in_flight,
    order_of_rank,
    place_turns,
    shares_waited,
)


@pytest.mark.parametrize(
    ("schedule", "stage", "order", "in_flight"),
    [
        ("gpipe", 0, "F0 F1 F2 F3 B0 B1 B2 B3", 4),
        ("gpipe", 1, "F0 F1 F2 F3 B0 B1 B2 B3", 4),
        ("1f1b", 0, "F0 F1 F2 B0 F3 B1 B2 B3", 3),
        ("1f1b", 1, "F0 F1 B0 F2 B1 F3 B2 B3", 2),
        ("1f1b", 2, "F0 B0 F1 B1 F2 B2 F3 B3", 1),
    ],
)
def test_order_of_four_microbatches(schedule: PipelineSchedule, stage: int, order: str, in_flight: int) -> None:
    """Three stages; under 1f1b the last one alternates from the beginning."""
    turns = microbatch_order(schedule, 3, stage, 4)
    assert " ".join(f"{turn.way[0].upper()}{turn.micro}" for turn in turns) == order
    assert microbatches_in_flight(turns) == in_flight


def test_fewer_microbatches_than_stages() -> None:
    """Each runs forward and backward once; no more than there are is in flight."""
    turns = microbatch_order("1f1b", 4, 0, 2)
    assert turns == [("forward", 0), ("forward", 1), ("backward", 0), ("backward", 1)]


def test_bubble() -> None:
    """(p-1)/(m+p-1) under 1f1b and gpipe; under interleaved a rank has two stages, and its wait is half."""
    assert bubble("1f1b", 4, 4) == bubble("gpipe", 4, 4) == 3 / 7
    assert bubble("1f1b", 2, 8) == 1 / 9
    assert bubble("interleaved", 4, 4) == 3 / 11


def test_bubble_in_words() -> None:
    """With the formula and its numbers; zero-bubble schedules have less than 1f1b, and how much less is not told."""
    assert describe_bubble(Axes(pipeline=4), 1) == (
        "75.0 % of a step, if all stages take equally long: (p - 1) / (m + p - 1) = 3 / 4, p = 4 stages, "
        "m = 1 microbatch"
    )
    assert describe_bubble(Axes(pipeline=4, schedule="interleaved"), 4) == (
        "27.3 % of a step, if all stages take equally long: (p - 1) / (2 m + p - 1) = 3 / 11, "
        "p = 4 ranks with 2 stages each, m = 4 microbatches"
    )
    assert describe_bubble(Axes(pipeline=2, schedule="zerobubble"), 8) == (
        "less than 11.1 % of a step, which is what 1f1b waits: (p - 1) / (m + p - 1) = 1 / 9, "
        "p = 2 ranks with 2 stages each, m = 8 microbatches"
    )


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("stages", "micros"), [(2, 8), (4, 4), (4, 12), (3, 1), (4, 2)])
def test_turns_in_time_wait_as_the_formula_says(schedule: PipelineSchedule, stages: int, micros: int) -> None:
    """Each stage runs every microbatch once each way, one after another, and waits for the rest of the step."""
    placed = place_turns(schedule, stages, micros)
    total = max(turn.end for turn in placed)
    for stage in range(stages):
        own = [turn for turn in placed if turn.stage == stage]
        assert [turn.turn for turn in own] == microbatch_order(schedule, stages, stage, micros)
        assert all(after.start >= before.end for before, after in itertools.pairwise(own))
        busy = sum(turn.end - turn.start for turn in own)
        assert busy == 3 * micros
        assert 1 - busy / total == pytest.approx(bubble(schedule, stages, micros))


CLASSES = {"interleaved": ScheduleInterleaved1F1B, "zerobubble": ScheduleInterleavedZeroBubble}
WAYS = {"FORWARD": "forward", "FULL_BACKWARD": "backward", "BACKWARD_INPUT": "inputs", "BACKWARD_WEIGHT": "weights"}


def orders_of_torch(schedule: str, ranks: int, pieces: int, micros: int) -> Mapping[int, list[Any]]:
    """Return what torch plans for each rank, by a group of ranks that are not there."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        module, device = torch.nn.Linear(1, 1), torch.device("cpu")
        stages = [PipelineStage(module, piece * ranks, pieces * ranks, device) for piece in range(pieces)]
        order = CLASSES[schedule](stages, micros, loss_fn=torch.nn.MSELoss()).pipeline_order  # type: ignore[arg-type]
    finally:
        dist.destroy_process_group()
    return {rank: [action for action in actions if action is not None] for rank, actions in order.items()}


@pytest.mark.parametrize("schedule", CLASSES)
@pytest.mark.parametrize(
    ("ranks", "pieces", "micros"),
    [(2, 2, 2), (2, 2, 8), (4, 2, 12), (3, 2, 6), (2, 3, 4), (4, 3, 8), (4, 2, 5), (2, 2, 1), (3, 2, 2)],
)
def test_orders_are_those_of_torch(schedule: PipelineSchedule, ranks: int, pieces: int, micros: int) -> None:
    """Stage, way and microbatch of every turn of every rank, also with fewer microbatches than ranks."""
    for rank, actions in orders_of_torch(schedule, ranks, pieces, micros).items():
        expected = [(a.stage_index, WAYS[a.computation_type.name], a.microbatch_index) for a in actions]
        own = [(stage, *turn) for stage, turn in order_of_rank(schedule, ranks, rank, micros, pieces)]
        assert own == expected


@pytest.mark.parametrize(("ranks", "micros"), [(2, 2), (2, 8), (4, 8), (3, 6), (4, 5), (2, 1), (3, 2)])
def test_two_stages_a_rank_in_time(ranks: int, micros: int) -> None:
    """interleaved waits as the formula says, also with fewer microbatches than ranks; zerobubble less than 1f1b."""
    assert shares_waited("interleaved", ranks, micros) == pytest.approx([bubble("interleaved", ranks, micros)] * ranks)
    assert all(share < bubble("1f1b", ranks, micros) for share in shares_waited("zerobubble", ranks, micros))
    for turn in (placed := place_turns("zerobubble", ranks, micros)):
        before = {"forward": turn.stage - 1, "inputs": turn.stage + 1}.get(turn.turn.way, -1)
        assert all(p.end <= turn.start for p in placed if (p.stage, p.turn) == (before, turn.turn))


def test_what_a_rank_with_two_stages_keeps() -> None:
    """Activations of each stage count; of a backward in halves, until that of the weights."""
    kept = {
        schedule: [microbatches_in_flight([turn for _, turn in order_of_rank(schedule, 2, rank, 8)]) for rank in (0, 1)]
        for schedule in ("1f1b", "interleaved", "zerobubble")
    }
    assert kept == {"1f1b": [2, 1], "interleaved": [5, 3], "zerobubble": [4, 4]}


def test_fewer_microbatches_than_ranks_of_two_stages() -> None:
    """A rank waits between its stages as well, and the formula says so."""
    assert describe_bubble(Axes(pipeline=3, schedule="interleaved"), 2) == (
        "42.9 % of a step, if all stages take equally long: (2 p - m - 1) / (m + 2 p - 1) = 3 / 7, "
        "p = 3 ranks with 2 stages each, m = 2 microbatches"
    )
