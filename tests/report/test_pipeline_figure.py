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
from unipar.config.sections.strategy import Axes
from unipar.report.charts.pipeline_chart import draw_pipeline, drawn_microbatches
from unipar.report.data.comparison_data import ComparisonPageData
from unipar.report.data.pipeline_data import PipelineFacts, read_pipeline
from unipar.report.data.run_data import RunPageData
from unipar.report.pages.comparison_page import render_comparison
from unipar.report.pages.pipeline_section import pipeline_section
from unipar.report.pages.run_page import render_run

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
    ("strategy", "config"),
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
def test_without_a_pipeline_or_a_config_there_is_none(strategy: str, config: dict[str, Any]) -> None:
    """Other strategies, and folders whose config is gone or was changed by hand."""
    assert read_pipeline(strategy, config) is None


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


def test_strategies_with_the_same_schedule_share_a_figure() -> None:
    """One heading for both, and the order of each stage as a table."""
    facts = PipelineFacts(Axes(pipeline=2), 2)
    text = pipeline_section([("a/nothing+pipeline2", facts), ("a/nothing", None), ("a/parameters+pipeline2", facts)])
    assert re.findall("<h3>([^<]*)</h3>", text) == ["a/nothing+pipeline2, a/parameters+pipeline2"]
    rows = re.findall("<tr>(<th scope=.row.*?)</tr>", text)
    assert [re.sub("<[^>]*>", "|", row).replace("||", "|").strip("|").split("|") for row in rows] == [
        ["0", "33.3 %", "2", "F0 F1 B0 B1"],
        ["1", "33.3 %", "1", "F0 B0 F1 B1"],
    ]


def test_a_rank_with_two_stages() -> None:
    """A row for each rank, a colour for each of its stages: 2 ranks x 2 stages x 4 microbatches, forward and back."""
    drawn = draw_pipeline(PipelineFacts(Axes(pipeline=2, schedule="interleaved"), 4), 920)
    assert re.findall(">(rank [0-9]|stage [0-9])<", drawn) == ["rank 0", "rank 1"]
    for stages, own in (((0, 1), ""), ((2, 3), " second")):
        for way in ("forward", "backward"):
            assert sorted(tip for *_, tip in boxes(drawn, way + own)) == [
                f"stage {stage}: {way} of microbatch {micro}" for stage in stages for micro in range(4)
            ]


def test_halves_of_a_backward() -> None:
    """Each as long as a forward; in the first stage there is one box, for both."""
    drawn = draw_pipeline(PipelineFacts(Axes(pipeline=2, schedule="zerobubble"), 2), 920)
    widths = {
        way: {tip: round(right - left) for left, right, tip in boxes(drawn, way)}
        for way in ("forward", "inputs", "weights")
    }
    unit = widths["forward"]["stage 0: forward of microbatch 0"]
    assert list(widths["inputs"]) == [f"stage 1: backward to the inputs of microbatch {micro}" for micro in (0, 1)]
    first = [w for tip, w in widths["weights"].items() if tip.startswith("stage 0: backward to the weights")]
    other = [w for tip, w in widths["weights"].items() if tip.startswith("stage 1: backward to the weights")]
    assert first == pytest.approx([2 * unit] * 2, abs=1)
    assert other == pytest.approx([unit] * 2, abs=1)


@pytest.mark.parametrize(
    ("schedule", "row", "key"),
    [
        (
            "interleaved",
            ["0", "20.0 %", "4", "F0.0 F1.0 F0.2 F1.2 B0.2 B1.2 B0.0 B1.0"],
            ["forward, stages 0 to 1", "backward, stages 0 to 1", "forward, stages 2 to 3", "backward, stages 2 to 3"],
        ),
        (
            "zerobubble",
            ["0", "7.7 %", "4", "F0.0 F1.0 F0.2 F1.2 I0.2 W0.2 I1.2 W1.2 I0.0 W0.0 I1.0 W1.0"],
            [
                *(
                    "forward, stages 0 to 1",
                    "gradients of inputs, stages 0 to 1",
                    "gradients of weights, stages 0 to 1",
                ),
                *(
                    "forward, stages 2 to 3",
                    "gradients of inputs, stages 2 to 3",
                    "gradients of weights, stages 2 to 3",
                ),
            ],
        ),
    ],
)
def test_the_order_of_a_schedule_of_torch(schedule: Any, row: list[str], key: list[str]) -> None:
    """As a table with the stage of each turn, and a legend that tells stages and halves apart."""
    text = pipeline_section([("a/nothing", PipelineFacts(Axes(pipeline=2, schedule=schedule), 2))])
    found = re.findall("<tr>(<th scope=.row.*?)</tr>", text)[0]
    assert re.sub("<[^>]*>", "|", found).replace("||", "|").strip("|").split("|") == row
    assert re.findall(r'<li><i class="[^"]*"></i>([^<]*)</li>', text) == [*key, "waits"]


def test_a_long_step_of_torch_is_shortened_by_rounds() -> None:
    """4 ranks run 4 microbatches in a row, so that 8 of 64 are drawn and none is cut."""
    assert drawn_microbatches(PipelineFacts(Axes(pipeline=4, schedule="interleaved"), 64)) == 8
    assert drawn_microbatches(PipelineFacts(Axes(pipeline=4, schedule="interleaved"), 5)) == 5


def test_the_page_of_a_run_has_it(tmp_path: Path) -> None:
    """Where its config has a pipeline."""
    folder = plain(tmp_path / "run")
    assert 'id="pipeline"' not in render_run(RunPageData.read(folder / "rank-0.jsonl"))
    config = {"parallel": {"data": 1, "pipeline": 2}, "batch": {"total": 8, "micro": 2}}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    run_log = folder / "rank-0.jsonl"
    lines = [json.loads(line) for line in run_log.read_text("utf-8").splitlines()]
    for row in lines:
        if row["event"] == "start":
            row["strategy"] = "native/nothing+pipeline2"
    run_log.write_text("".join(json.dumps(row) + "\n" for row in lines), encoding="utf-8")
    text = render_run(RunPageData.read(run_log))
    assert "1f1b: a stage waits 20.0" in text
    assert len(boxes(text[: text.index('class="narrow"', text.index('id="pipeline"'))], "forward")) == 8


def test_a_comparison_without_pipelines_has_no_such_section(tmp_path: Path) -> None:
    """Its page is as before."""
    text = render_comparison(ComparisonPageData.read(write_example_comparison(tmp_path / "run")))
    assert 'id="pipeline"' not in text
