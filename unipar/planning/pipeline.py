"""Order in which the stages of a pipeline run microbatches, and the share of a step in which a stage waits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from unipar.config.sections.cell import Axes, PipelineSchedule

TurnWay = Literal["forward", "backward"]


class Turn(NamedTuple):
    """One forward or backward of one microbatch on one stage."""

    way: TurnWay
    micro: int


def microbatch_order(schedule: PipelineSchedule, stages: int, stage: int, micros: int) -> list[Turn]:
    """Return what a stage does in a step, in order, under gpipe or 1f1b.

    gpipe runs all forwards first; 1f1b begins with backward as soon as it can, so that few microbatches are in flight.
    """
    forwards = [Turn("forward", i) for i in range(micros)]
    backwards = [Turn("backward", i) for i in range(micros)]
    ahead = micros if schedule == "gpipe" else min(stages - 1 - stage, micros)
    order = forwards[:ahead]
    for turns in zip(forwards[ahead:], backwards, strict=False):
        order += turns
    return order + backwards[micros - ahead :]


def microbatches_in_flight(order: Sequence[Turn]) -> int:
    """Return the largest number of microbatches whose activations a stage keeps at the same time."""
    most = now = 0
    for turn in order:
        now += 1 if turn.way == "forward" else -1
        most = max(most, now)
    return most


def bubble(schedule: PipelineSchedule, ranks: int, micros: int) -> float:
    """Return the share of a step in which a rank waits, if all stages take equally long; zerobubble: at most."""
    pieces = Axes(schedule=schedule).pieces if schedule == "interleaved" else 1
    return (ranks - 1) / (pieces * micros + ranks - 1)


def describe_bubble(axes: Axes, micros: int) -> str:
    """Return the bubble of a pipeline in words, with its arithmetic."""
    ranks, v = axes.pipeline, axes.pieces
    ratio = f"{ranks - 1} / {(v if axes.schedule == 'interleaved' else 1) * micros + ranks - 1}"
    share = f"{100 * bubble(axes.schedule, ranks, micros):.1f} %"
    of_ranks = f"p = {ranks} stages" if v == 1 else f"p = {ranks} ranks with {v} stages each"
    where = f"{of_ranks}, m = {micros} microbatch{'es' * (micros != 1)}"
    if axes.schedule == "zerobubble":
        formula = "(p - 1) / (m + p - 1)"
        return f"less than {share} of a step, which is what 1f1b waits: {formula} = {ratio}, {where}"
    formula = f"(p - 1) / ({v} m + p - 1)" if v > 1 else "(p - 1) / (m + p - 1)"
    return f"{share} of a step, if all stages take equally long: {formula} = {ratio}, {where}"


class PlacedTurn(NamedTuple):
    """A turn of one stage, in units of a forward's time since the step began."""

    stage: int
    turn: Turn
    start: int
    end: int


_TURN_TIMES: dict[TurnWay, int] = {"forward": 1, "backward": 2}
"""Time of a turn in units of a forward's: a backward computes gradients of inputs and of weights."""


def place_turns(schedule: PipelineSchedule, stages: int, micros: int) -> list[PlacedTurn]:
    """Return all turns of all stages in time, under gpipe or 1f1b, if all stages take equally long.

    A stage begins its next turn when it has ended the one before, and what that turn needs has been computed: the
    hidden states of the stage before it, or the gradient of the one behind it.
    """
    orders = [microbatch_order(schedule, stages, stage, micros) for stage in range(stages)]
    ends: dict[tuple[int, Turn], int] = {}
    placed: list[PlacedTurn] = []
    next_of, free = [0] * stages, [0] * stages
    while len(placed) < 2 * micros * stages:
        for stage, order in enumerate(orders):
            if next_of[stage] == len(order):
                continue
            turn = order[next_of[stage]]
            forward = turn.way == "forward"
            other = stage - 1 if forward else stage + 1
            needed = [(other, turn)] if 0 <= other < stages else []
            if all(key in ends for key in needed):
                start = max([free[stage], *(ends[key] for key in needed)])
                free[stage] = ends[stage, turn] = start + _TURN_TIMES[turn.way]
                placed.append(PlacedTurn(stage, turn, start, free[stage]))
                next_of[stage] += 1
    return placed
