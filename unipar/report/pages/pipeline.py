"""Section of a page on the schedule of pipelines."""

from __future__ import annotations

from collections.abc import Iterable

from unipar.planning.pipeline import bubble, describe_bubble, microbatch_order, microbatches_in_flight
from unipar.report.charts.pipeline import draw_pipeline, drawn_microbatches
from unipar.report.data.pipeline import PipelineFacts
from unipar.report.pages.elements import colour_key, escape, html_figure, html_section, html_table, paragraph
from unipar.utils.text import first_few


def pipeline_section(pipelines: Iterable[tuple[str, PipelineFacts | None]]) -> str:
    """Return the section on the schedule of each cell that has a pipeline, or "" without any."""
    cells_of: dict[PipelineFacts, list[str]] = {}
    for cell, pipeline in pipelines:
        if pipeline is not None:
            cells_of.setdefault(pipeline, []).append(cell)
    if not cells_of:
        return ""
    key = colour_key([("turn forward", "forward"), ("turn backward", "backward"), ("phase", "waits")])
    parts: list[str] = []
    for pipeline, cells in cells_of.items():
        parts += [f"<h3>{escape(first_few(cells))}</h3>", *_one_pipeline(pipeline)]
    return html_section(
        "pipeline",
        "Schedule of the pipeline",
        paragraph(
            "Which microbatch each stage of the pipeline works on, as its schedule says: not measured. Here all stages "
            "take equally long, and a backward takes twice as long as a forward."
        ),
        key,
        *parts,
    )


def _one_pipeline(pipeline: PipelineFacts) -> list[str]:
    axes, micros = pipeline.axes, pipeline.micros
    waits = paragraph(f"{axes.schedule}: a stage waits {describe_bubble(axes, micros)}.")
    if axes.schedule not in ("1f1b", "gpipe"):
        return [waits, paragraph(f"The order of {axes.schedule} is torch's own, and is not drawn.", "note")]
    shown = drawn_microbatches(pipeline)
    more = f"Drawn with {shown} of {micros} microbatches: those in the middle follow in the same way."
    rows: list[list[str]] = []
    for stage in range(axes.pipeline):
        order = microbatch_order(axes.schedule, axes.pipeline, stage, shown)
        kept = microbatches_in_flight(microbatch_order(axes.schedule, axes.pipeline, stage, micros))
        words = " ".join(f"{turn.way[0].upper()}{turn.micro}" for turn in order)
        rows.append([str(stage), f"{100 * bubble(axes.schedule, axes.pipeline, micros):.1f} %", str(kept), words])
    head = ["stage", "waits", "microbatches in flight", "order"]
    table = html_table(head, rows, "Order of forwards (F) and backwards (B) on each stage", (0, 3))
    return [
        waits,
        paragraph(more if shown < micros else "", "note"),
        html_figure(lambda width: draw_pipeline(pipeline, width), table),
    ]
