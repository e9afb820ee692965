"""Figure of a pipeline's schedule: which microbatch runs on which stage, on the pages of a run and of a comparison."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.comparisons import write_example_comparison
from tests.support.run_folders import plain
from unipar.config.sections.cell import Axes
from unipar.report.charts.pipeline import draw_pipeline, drawn_microbatches
from unipar.report.data.comparison import ComparisonPageData
from unipar.report.data.pipeline import PipelineFacts, read_pipeline
from unipar.report.data.run import RunPageData
from unipar.report.pages.comparison import render_comparison
from unipar.report.pages.pipeline import pipeline_section
from unipar.report.pages.run import render_run

CONFIG: dict[str, Any] = {"batch.total": 16, "batch.micro": 2, "batch.accumulate": None, "parallel.data": 2}


def boxes(drawn: str, kind: str) -> list[tuple[float, float, str]]:
    """Return left and right end of each box of this kind, and what a pointer over it shows."""
    pattern = rf'<rect x="([\d.]+)" y="[\d.]+" width="([\d.]+)" height="22.0" class="turn {kind}"><title>([^<]*)<'
    return [(float(x), float(x) + float(w), tip) for x, w, tip in re.findall(pattern, drawn)]


def test_a_pipeline_is_read_from_a_config() -> None:
    """16 samples in microbatches of 2 for each of 2 ranks of the data are 4 microbatches on every stage."""
    facts = read_pipeline("native/parameters+pipeline3+gpipe", CONFIG)
    assert facts == PipelineFacts(Axes(pipeline=3, schedule="gpipe"), 4)


@pytest.mark.parametrize(
    ("cell", "config"),
    [
        ("native/nothing", CONFIG),
        ("native/nothing+tensor2", CONFIG),
        ("single", CONFIG),
        ("native/nothing+pipeline2", {}),
        ("native/nothing+pipeline2", CONFIG | {"batch.total": 15}),
        ("native/nothing+pipeline2", CONFIG | {"parallel.data": "auto"}),
        ("native/nothing+pipelines", CONFIG),
    ],
)
def test_without_a_pipeline_or_a_config_there_is_none(cell: str, config: dict[str, Any]) -> None:
    """Other cells, and folders whose config is gone or was changed by hand."""
    assert read_pipeline(cell, config) is None


@pytest.mark.parametrize("width", [390, 920])
def test_each_turn_is_a_box(width: int) -> None:
    """2 stages x 3 microbatches; a backward is twice as wide, and a microbatch goes from stage to stage and back."""
    drawn = draw_pipeline(PipelineFacts(Axes(pipeline=2), 3), width)
    forwards, backwards = boxes(drawn, "forward"), boxes(drawn, "backward")
    assert sorted(tip for *_, tip in forwards) == [
        f"stage {stage}: forward of microbatch {micro}" for stage in (0, 1) for micro in (0, 1, 2)
    ]
    assert len(backwards) == 6
    forward, backward = ({right - left for left, right, _ in found} for found in (forwards, backwards))
    assert max(backward) == pytest.approx(2 * min(forward), abs=0.5)
    ends = {tip: (left, right) for left, right, tip in (*forwards, *backwards)}
    for micro in (0, 1, 2):
        way = [ends[f"stage {s}: {w} of microbatch {micro}"] for w, s in FORTH_AND_BACK]
        for before, after in itertools.pairwise(way):
            assert after[0] >= before[1] - 0.2


FORTH_AND_BACK = [("forward", 0), ("forward", 1), ("backward", 1), ("backward", 0)]


def test_a_long_step_is_shortened() -> None:
    """The middle repeats itself: what is drawn has room for each box, and the text has the true number."""
    facts = PipelineFacts(Axes(pipeline=4), 256)
    assert drawn_microbatches(facts) == 22
    assert min(right - left for left, right, _ in boxes(draw_pipeline(facts, 390), "forward")) >= 4
    text = pipeline_section([("native/nothing+pipeline4", facts)])
    assert "Drawn with 22 of 256 microbatches: those in the middle follow in the same way." in text
    assert "(p - 1) / (m + p - 1) = 3 / 259, p = 4 stages, m = 256 microbatches." in text


def test_cells_with_the_same_schedule_share_a_figure() -> None:
    """One heading for both, and the order of each stage as a table."""
    facts = PipelineFacts(Axes(pipeline=2), 2)
    text = pipeline_section([("a/nothing+pipeline2", facts), ("a/nothing", None), ("a/parameters+pipeline2", facts)])
    assert re.findall("<h3>([^<]*)</h3>", text) == ["a/nothing+pipeline2, a/parameters+pipeline2"]
    rows = re.findall("<tr>(<th scope=.row.*?)</tr>", text)
    assert [re.sub("<[^>]*>", "|", row).replace("||", "|").strip("|").split("|") for row in rows] == [
        ["0", "33.3 %", "2", "F0 F1 B0 B1"],
        ["1", "33.3 %", "1", "F0 B0 F1 B1"],
    ]


@pytest.mark.parametrize("schedule", ["interleaved", "zerobubble"])
def test_orders_of_torch_are_not_drawn(schedule: Any) -> None:
    """They are not those of 1f1b; the bubble is told in words."""
    text = pipeline_section([("a/nothing", PipelineFacts(Axes(pipeline=2, schedule=schedule), 2))])
    assert "<svg" not in text
    assert f"The order of {schedule} is torch&#x27;s own, and is not drawn." in text


def test_the_page_of_a_run_has_it(tmp_path: Path) -> None:
    """Where its config has a pipeline."""
    folder = plain(tmp_path / "run")
    assert 'id="pipeline"' not in render_run(RunPageData.read(folder / "rank-0.jsonl"))
    config = {"parallel": {"data": 1, "pipeline": 2}, "batch": {"total": 8, "micro": 2}}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    ledger = folder / "rank-0.jsonl"
    lines = [json.loads(line) for line in ledger.read_text("utf-8").splitlines()]
    for row in lines:
        if row["event"] == "start":
            row["cell"] = "native/nothing+pipeline2"
    ledger.write_text("".join(json.dumps(row) + "\n" for row in lines), encoding="utf-8")
    text = render_run(RunPageData.read(ledger))
    assert "1f1b: a stage waits 20.0" in text
    assert len(boxes(text[: text.index('class="narrow"', text.index('id="pipeline"'))], "forward")) == 8


def test_a_comparison_without_pipelines_has_no_such_section(tmp_path: Path) -> None:
    """Its page is as before."""
    text = render_comparison(ComparisonPageData.read(write_example_comparison(tmp_path / "run")))
    assert 'id="pipeline"' not in text
