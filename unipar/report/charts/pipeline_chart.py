"""Figure of a pipeline's schedule: which microbatch runs on which stage, in time."""

from __future__ import annotations

from unipar.planning.pipeline_order import TurnWay, place_turns
from unipar.report.charts.bars import BarRows
from unipar.report.charts.svg import text_width
from unipar.report.data.pipeline_data import PipelineFacts

MOST_ROUNDS_DRAWN = 26
"""Largest number of forwards of a rank and further ranks in a figure: a forward is then 4 pixels wide on a phone."""

_WORDS_OF_WAYS = {"inputs": "backward to the inputs", "weights": "backward to the weights"}


def drawn_microbatches(pipeline: PipelineFacts) -> int:
    """Return how many microbatches the figure shows; the middle of a longer step repeats itself.

    Under torch's schedules that is a whole number of rounds, a microbatch for each rank.
    """
    ranks, pieces = pipeline.axes.pipeline, pipeline.axes.pieces
    most = max(ranks, (MOST_ROUNDS_DRAWN - ranks) // pieces)
    if pipeline.micros <= most:
        return pipeline.micros
    return most if pieces == 1 else most - most % ranks


def draw_pipeline(pipeline: PipelineFacts, width: int) -> str:
    """Draw a row for each rank, with a box for each forward and backward, and the time in which it waits empty.

    A rank has one stage or several; those of the second have a colour of their own.
    """
    ranks, pieces = pipeline.axes.pipeline, pipeline.axes.pieces
    turns = place_turns(pipeline.axes.schedule, ranks, drawn_microbatches(pipeline))
    total = max(turn.end for turn in turns)
    name = "stage" if pieces == 1 else "rank"
    label = f"Order of microbatches on {ranks} {name}s under {pipeline.axes.schedule}"
    rows = BarRows([f"{name} {rank}" for rank in range(ranks)], width, 28, total, label, 4)
    for rank in range(ranks):
        rows.draw_name(rank)
        rows.drawing.rect(rows.x.start, rows.y(rank) + 3, rows.x.end - rows.x.start, 22, "phase")
    for stage, turn, start, end in turns:
        if start == end:
            continue
        left, right, words = rows.x(start), rows.x(end), str(turn.micro)
        tip = f"stage {stage}: {_WORDS_OF_WAYS.get(turn.way, turn.way)} of microbatch {turn.micro}"
        y, kind = rows.y(stage % ranks), turn_class(turn.way, stage // ranks)
        rows.drawing.rect(left, y + 3, right - left, 22, kind, tip)
        if right - left >= text_width(words) + 2:
            rows.drawing.text((left + right) / 2, y + 18.5, words, "", "middle")
    rows.drawing.text(rows.x.end, rows.bottom + 16, "time of one step", "tick", "end")
    return str(rows.drawing)


def turn_class(way: TurnWay, piece: int) -> str:
    """Return the class of a box: its colour tells forward from backward, and the rank's first stage from its second."""
    return f"turn {way}" + " second" * (piece > 0)
