"""Section of a page on the schedule of pipelines."""

from __future__ import annotations

from collections.abc import Iterable

from unipar.config.sections.strategy import Axes
from unipar.planning.pipeline_order import (
    StageTurn,
    TurnWay,
    describe_bubble,
    microbatches_in_flight,
    order_of_rank,
    shares_waited,
)
from unipar.report.charts.pipeline_chart import draw_pipeline, drawn_microbatches, turn_class
from unipar.report.data.pipeline_data import PipelineFacts
from unipar.report.html.elements import colour_key, escape, html_figure, html_section, html_table, paragraph
from unipar.utils.text import first_few


def pipeline_section(pipelines: Iterable[tuple[str, PipelineFacts | None]]) -> str:
    """Return the section on the schedule of each strategy that has a pipeline, or "" without any."""
    strategies_of: dict[PipelineFacts, list[str]] = {}
    for strategy, pipeline in pipelines:
        if pipeline is not None:
            strategies_of.setdefault(pipeline, []).append(strategy)
    if not strategies_of:
        return ""
    schedules = {pipeline.axes.schedule for pipeline in strategies_of}
    halves = (
        " Under zerobubble a backward has two halves, gradients of inputs and of weights, each as long as a forward; "
        "the first stage, whose inputs need no gradients, runs both as one."
        if "zerobubble" in schedules
        else ""
    )
    several = " A rank has two stages, with a colour each." if schedules & {"interleaved", "zerobubble"} else ""
    parts: list[str] = []
    for pipeline, strategies in strategies_of.items():
        parts += [f"<h3>{escape(first_few(strategies))}</h3>", *_one_pipeline(pipeline)]
    return html_section(
        "pipeline",
        "Schedule of the pipeline",
        paragraph(
            "Which microbatch each stage of the pipeline works on, as its schedule says: not measured. Here all stages "
            f"take equally long, and a backward takes twice as long as a forward.{several}{halves}"
        ),
        *parts,
    )


def _key(axes: Axes) -> str:
    """Return the legend of one figure."""
    ways: list[tuple[TurnWay, str]] = [("forward", "forward"), ("backward", "backward")]
    if axes.schedule == "zerobubble":
        ways = [("forward", "forward"), ("inputs", "gradients of inputs"), ("weights", "gradients of weights")]
    p = axes.pipeline
    stages = (
        [""] if axes.pieces == 1 else [f", stages {p * piece} to {p * piece + p - 1}" for piece in range(axes.pieces)]
    )
    colours = [(turn_class(way, piece), label + own) for piece, own in enumerate(stages) for way, label in ways]
    return colour_key([*colours, ("phase", "waits")])


def _one_pipeline(pipeline: PipelineFacts) -> list[str]:
    axes, micros = pipeline.axes, pipeline.micros
    shown = drawn_microbatches(pipeline)
    more = f"Drawn with {shown} of {micros} microbatches: those in the middle follow in the same way."
    waits = shares_waited(axes.schedule, axes.pipeline, micros)
    rows: list[list[str]] = []
    for rank in range(axes.pipeline):
        kept = [turn for _, turn in order_of_rank(axes.schedule, axes.pipeline, rank, micros)]
        order = order_of_rank(axes.schedule, axes.pipeline, rank, shown)
        words = " ".join(_word(turn, axes) for turn in order)
        rows.append([str(rank), f"{100 * waits[rank]:.1f} %", str(microbatches_in_flight(kept)), words])
    head = ["stage" if axes.pieces == 1 else "rank", "waits", "microbatches in flight", "order"]
    title = "Order of forwards (F) and backwards (B) on each stage"
    if axes.pieces > 1:
        backwards = "backwards in halves (I: inputs, W: weights)" if axes.schedule == "zerobubble" else "backwards (B)"
        title = f"Order of forwards (F) and {backwards} on each rank, as microbatch.stage"
    return [
        paragraph(f"{axes.schedule}: a stage waits {describe_bubble(axes, micros)}."),
        paragraph(more if shown < micros else "", "note"),
        _key(axes),
        html_figure(lambda width: draw_pipeline(pipeline, width), html_table(head, rows, title, (0, 3))),
    ]


def _word(placed: StageTurn, axes: Axes) -> str:
    """Return a turn in a word: F0, or F0.2 in the third stage where a rank has several."""
    stage = f".{placed.stage}" if axes.pieces > 1 else ""
    return f"{placed.turn.way[0].upper()}{placed.turn.micro}{stage}"
