"""Figure of a pipeline's schedule: which microbatch runs on which stage, in time."""

from __future__ import annotations

from unipar.planning.pipeline import place_turns
from unipar.report.charts.bars import BarRows
from unipar.report.charts.svg import text_width
from unipar.report.data.pipeline import PipelineFacts

MOST_ROUNDS_DRAWN = 26
"""Largest number of microbatches and further stages in a figure: a forward is then 4 pixels wide on a phone."""


def drawn_microbatches(pipeline: PipelineFacts) -> int:
    """Return how many microbatches the figure shows; the middle of a longer step repeats itself."""
    stages = pipeline.axes.pipeline
    return min(pipeline.micros, max(stages, MOST_ROUNDS_DRAWN - stages))


def draw_pipeline(pipeline: PipelineFacts, width: int) -> str:
    """Draw a row for each stage, with a box for each forward and backward, and the time in which it waits empty."""
    stages = pipeline.axes.pipeline
    turns = place_turns(pipeline.axes.schedule, stages, drawn_microbatches(pipeline))
    total = max(turn.end for turn in turns)
    label = f"Order of microbatches on {stages} stages under {pipeline.axes.schedule}"
    rows = BarRows([f"stage {stage}" for stage in range(stages)], width, 28, total, label, 4)
    for stage in range(stages):
        rows.draw_name(stage)
        rows.drawing.rect(rows.x.start, rows.y(stage) + 3, rows.x.end - rows.x.start, 22, "phase")
    for stage, turn, start, end in turns:
        left, right, words = rows.x(start), rows.x(end), str(turn.micro)
        tip = f"stage {stage}: {turn.way} of microbatch {turn.micro}"
        rows.drawing.rect(left, rows.y(stage) + 3, right - left, 22, f"turn {turn.way}", tip)
        if right - left >= text_width(words) + 2:
            rows.drawing.text((left + right) / 2, rows.y(stage) + 18.5, words, "", "middle")
    rows.drawing.text(rows.x.end, rows.bottom + 16, "time of one step", "tick", "end")
    return str(rows.drawing)
