"""Order in which the stages of a pipeline run microbatches, and the share of a step in which a stage waits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from unipar.config.sections.strategy import Axes, PipelineSchedule

TurnWay = Literal["forward", "backward", "inputs", "weights"]
"""Turn of a stage with a microbatch; inputs, weights: the halves of a backward, for what it got and for its own."""


class Turn(NamedTuple):
    """One forward or backward, or half of a backward, of one microbatch on one stage."""

    way: TurnWay
    micro: int


class StageTurn(NamedTuple):
    """A turn of a rank, with the stage of the model that takes it."""

    stage: int
    turn: Turn


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


def order_of_rank(
    schedule: PipelineSchedule, ranks: int, rank: int, micros: int, pieces: int | None = None
) -> list[StageTurn]:
    """Return what a rank does in a step, in order; stage k is on rank k mod `ranks`, `pieces` stages on each.

    interleaved and zerobubble are the orders of torch's ScheduleInterleaved1F1B and ScheduleInterleavedZeroBubble.
    """
    if schedule in ("gpipe", "1f1b"):
        return [StageTurn(rank, turn) for turn in microbatch_order(schedule, ranks, rank, micros)]
    pieces = pieces or Axes(schedule=schedule).pieces
    halves = schedule == "zerobubble"
    each = micros // max(1, micros // ranks)  # microbatches that a stage runs in a row
    total = pieces * micros
    ahead = min((pieces - 1) * each + (1 if halves else 2) * (ranks - 1 - rank), total)

    def turns(way: TurnWay, *, last_first: bool) -> list[StageTurn]:
        pieces_in_turn = [number // each % pieces for number in range(total)]
        done = [0] * pieces
        order: list[StageTurn] = []
        for piece in pieces_in_turn:
            own = pieces - 1 - piece if last_first else piece
            order.append(StageTurn(own * ranks + rank, Turn(way, done[own])))
            done[own] += 1
        return order

    forwards = turns("forward", last_first=False)
    backwards = turns("inputs" if halves else "backward", last_first=True)
    weights = turns("weights", last_first=True) if halves else []
    order = forwards[:ahead]
    for number, backward in enumerate(backwards):
        order += forwards[ahead + number : ahead + number + 1]
        order.append(backward)
        if number >= rank:
            order += weights[number - rank : number - rank + 1]
    return order + weights[max(0, total - rank) :]


def microbatches_in_flight(order: Sequence[Turn]) -> int:
    """Return the largest number of microbatches whose activations a rank keeps, those of each of its stages counted.

    A backward in halves needs them until its second half, that of the weights.
    """
    most = now = 0
    for turn in order:
        now += {"forward": 1, "inputs": 0}.get(turn.way, -1)
        most = max(most, now)
    return most


def bubble(schedule: PipelineSchedule, ranks: int, micros: int) -> float:
    """Return the share of a step in which a rank waits, if all stages take equally long; zerobubble: at most."""
    waits = _waiting_turns(schedule, ranks, micros)
    return waits / ((Axes(schedule=schedule).pieces if schedule == "interleaved" else 1) * micros + waits)


def _waiting_turns(schedule: PipelineSchedule, ranks: int, micros: int) -> int:
    """Return for how many turns, forward and backward, a rank waits in a step."""
    idle = ranks - 1
    return idle + max(0, ranks - micros) if schedule == "interleaved" else idle  # between a rank's two stages


def describe_bubble(axes: Axes, micros: int) -> str:
    """Return the bubble of a pipeline in words, with its arithmetic."""
    ranks, v = axes.pipeline, axes.pieces
    waits = _waiting_turns(axes.schedule, ranks, micros)
    ratio = f"{waits} / {(v if axes.schedule == 'interleaved' else 1) * micros + waits}"
    share = f"{100 * bubble(axes.schedule, ranks, micros):.1f} %"
    of_ranks = f"p = {ranks} stages" if v == 1 else f"p = {ranks} ranks with {v} stages each"
    where = f"{of_ranks}, m = {micros} microbatch{'es' * (micros != 1)}"
    if axes.schedule == "zerobubble":
        formula = "(p - 1) / (m + p - 1)"
        return f"less than {share} of a step, which is what 1f1b waits: {formula} = {ratio}, {where}"
    formula = f"(p - 1) / ({v} m + p - 1)" if v > 1 else "(p - 1) / (m + p - 1)"
    if v > 1 and micros < ranks:
        formula = "(2 p - m - 1) / (m + 2 p - 1)"
    return f"{share} of a step, if all stages take equally long: {formula} = {ratio}, {where}"


class PlacedTurn(NamedTuple):
    """A turn of one stage, in units of a forward's time since the step began; on rank: stage mod ranks."""

    stage: int
    turn: Turn
    start: int
    end: int


_TURN_TIMES: dict[TurnWay, int] = {"forward": 1, "backward": 2, "inputs": 1, "weights": 1}
"""Time of a turn in units of a forward's: a backward computes gradients of inputs and of weights."""


def turn_time(stage: int, way: TurnWay) -> int:
    """Return the time of a turn in units of a forward's; the first stage has no inputs' half: torch runs both later."""
    return {"inputs": 0, "weights": 2}.get(way, _TURN_TIMES[way]) if stage == 0 else _TURN_TIMES[way]


def place_turns(schedule: PipelineSchedule, ranks: int, micros: int) -> list[PlacedTurn]:
    """Return all turns of all stages in time, if all stages take equally long; stage k is on rank k mod `ranks`.

    A rank begins its next turn when it has ended the one before, and what that turn needs has been computed: the hidden
    states of the stage before, or the gradient of the one behind.
    """
    orders = [order_of_rank(schedule, ranks, rank, micros) for rank in range(ranks)]
    last = ranks * Axes(schedule=schedule).pieces - 1
    ends: dict[StageTurn, int] = {}
    placed: list[PlacedTurn] = []
    next_of, free = [0] * ranks, [0] * ranks
    while len(placed) < sum(map(len, orders)):
        for rank, order in enumerate(orders):
            if next_of[rank] == len(order):
                continue
            stage, turn = order[next_of[rank]]
            other = {"forward": stage - 1, "weights": -1}.get(turn.way, stage + 1)
            needed = [StageTurn(other, turn)] if 0 <= other <= last else []
            if all(key in ends for key in needed):
                start = max([free[rank], *(ends[key] for key in needed)])
                free[rank] = ends[StageTurn(stage, turn)] = start + turn_time(stage, turn.way)
                placed.append(PlacedTurn(stage, turn, start, free[rank]))
                next_of[rank] += 1
    return placed


def shares_waited(schedule: PipelineSchedule, ranks: int, micros: int) -> list[float]:
    """Return for each rank the share of a step in which it waits, if all stages take equally long."""
    placed = place_turns(schedule, ranks, micros)
    total = max(turn.end for turn in placed)
    busy = [sum(turn.end - turn.start for turn in placed if turn.stage % ranks == rank) for rank in range(ranks)]
    return [1 - time / total for time in busy]
