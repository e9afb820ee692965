"""Order in which the stages of a pipeline run microbatches, and the share of a step in which a stage waits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from unipar.config.sections.cell import PipelineSchedule

Way = Literal["forward", "backward"]


class Turn(NamedTuple):
    """One forward or backward of one microbatch on one stage."""

    way: Way
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


def bubble(schedule: PipelineSchedule, stages: int, micros: int, chunks: int = 1) -> float:
    """Return the share of a step in which a stage waits, if all blocks take equally long.

    `chunks` is the number of pieces of the model that a stage has under `interleaved`.
    """
    waits = (stages - 1) / (chunks if schedule == "interleaved" else 1)
    return waits / (micros + waits)
