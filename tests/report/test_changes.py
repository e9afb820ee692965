"""Comparing two folders: mismatches are named first, and what cannot be compared is left out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.comparisons import account, edit_example_comparison, write_example_comparison
from tests.support.run_folders import plain
from unipar import errors
from unipar.memory.sources.malloc_meter import MallocMeter
from unipar.report.build import write_page
from unipar.report.charts.bars import draw_memory_bars
from unipar.report.data import result_changes as changes
from unipar.report.data.comparison_data import ComparisonPageData
from unipar.report.pages.comparison_page import render_comparison
from unipar.results.same_training import TrainingMarks

MARKS = TrainingMarks(
    values={"wte.weight": "0a", "head.weight": "0b"},
    kept=("float32",),
    computed=("float32",),
    batches=(("aa",),),
    samples=((8, "01"), (8, "02")),
    total=8,
    precision="fp32",
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_example_comparison(tmp_path / "run")


def marked(marks: TrainingMarks) -> Callable[[dict[str, Any]], object]:
    """Return an edit that gives the one process these marks."""
    return lambda data: data["strategies"][0].update(marks=marks.model_dump(mode="json"))


def altered(**told: Any) -> Callable[[dict[str, Any]], object]:
    return lambda data: data.update(told)


def test_what_was_trained_in_the_same_way_is_alike(run: Path, tmp_path: Path) -> None:
    """Another folder, other settings and other results are not mismatches."""
    later = write_example_comparison(tmp_path / "later", scale=0.9, fused=True, use="/y/char_gpt.py:CharGPT")
    for folder in (run, later):
        edit_example_comparison(folder, marked(MARKS))
    assert changes.describe_mismatches(ComparisonPageData.read(run), ComparisonPageData.read(later)) == []


@pytest.mark.parametrize(
    ("differs", "said"),
    [
        ({"parameters": 263_000}, "parameters 8,926,848 before, 263,000 now"),
        ({"use": "/x/gan.py:Gan"}, "task char_gpt.py:CharGPT before, gan.py:Gan now"),
    ],
)
def test_another_model_is_said(run: Path, tmp_path: Path, differs: dict[str, Any], said: str) -> None:
    """Another number of parameters, or another task, is named above the first change."""
    later = write_example_comparison(tmp_path / "later", **differs)
    assert changes.describe_mismatches(ComparisonPageData.read(run), ComparisonPageData.read(later)) == [
        f"The two differ: {said}."
    ]
    text = write_page(run, later).read_text("utf-8")
    head = text[: text.index("</header>")]
    assert head.index(f"The two differ: {said}.") < head.index("Since ")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (altered(precision="bf16-mixed"), "precision fp32 before, bf16-mixed now"),
        (altered(samples=16), "total batch 8 before, 16 now"),
        (altered(samples=16, precision="fp64"), "precision fp32 before, fp64 now; total batch 8 before, 16 now"),
        (marked(MARKS.model_copy(update={"samples": ((8, "01"), (8, "09"))})), "different samples from step 2 on"),
        (marked(MARKS.model_copy(update={"total": 16, "samples": ((16, "01"),)})), ""),
        (marked(MARKS.model_copy(update={"readers": 2, "samples": ((8, "07"),)})), ""),
        (
            marked(MARKS.model_copy(update={"values": {"wte.weight": "0c", "head.weight": "0b"}})),
            "different initial values of 1 parameter",
        ),
        (
            marked(MARKS.model_copy(update={"values": {"wte.weight": "0a", "top.weight": "0b"}})),
            "different parameter names",
        ),
    ],
)
def test_what_was_changed_on_purpose_is_said_with_both_values(
    run: Path, tmp_path: Path, changed: Callable[[dict[str, Any]], object], said: str
) -> None:
    """Each mismatch has both values; different samples are not named if the batch or the number of readers differs."""
    edit_example_comparison(run, marked(MARKS))
    later = edit_example_comparison(
        edit_example_comparison(write_example_comparison(tmp_path / "later"), marked(MARKS)), changed
    )
    found = changes.describe_mismatches(ComparisonPageData.read(run), ComparisonPageData.read(later))
    assert found == ([f"The two differ: {said}."] if said else [])


def test_ranks_and_devices_are_said(run: Path, tmp_path: Path) -> None:
    """Devices are known from memory accounts, and not compared without them."""

    def elsewhere(data: dict[str, Any]) -> None:
        data["ranks"] = 1
        for told in (told for strategy in data["strategies"][:-1] for told in strategy["memory"]):
            told["device"] = "cuda"

    later = edit_example_comparison(write_example_comparison(tmp_path / "later"), elsewhere)
    assert changes.describe_mismatches(ComparisonPageData.read(run), ComparisonPageData.read(later)) == [
        "The two differ: ranks 2 before, 1 now; device cpu before, cuda now."
    ]
    without = write_example_comparison(tmp_path / "without", memory=False)
    assert changes.describe_mismatches(ComparisonPageData.read(run), ComparisonPageData.read(without)) == []


def test_memory_that_was_watched_in_two_ways_is_not_compared(run: Path, tmp_path: Path) -> None:
    """Memory is left out of sentences, tables and figures; times are compared."""
    later = write_example_comparison(tmp_path / "later", scale=0.5, quicker=0.95, method=MallocMeter.method)
    before, now = ComparisonPageData.read(run), ComparisonPageData.read(later)
    assert changes.describe_mismatches(before, now) == [
        "Memory is not compared, it was measured in two ways: torch's own allocator, by a profiler's events before, "
        "malloc, counted by a preloaded meter now."
    ]
    before = changes.without_incomparable_memory(before, now)
    assert changes.describe_largest_change(before, now) == f"Since {run}/compare: single takes 5.0 % less time a step."
    assert changes.change_rows(before, now)[1] == ["native/nothing", "-", "89 MiB", "-", "526 ms", "500 ms", "-5.0 %"]
    assert "before, native/nothing" not in draw_memory_bars(now, before, 900)
    text = render_comparison(now, ComparisonPageData.read(run))
    assert "less memory" not in text
    assert 'class="curve before"' not in text
    assert 'class="point before"' not in text
    assert text.index("Memory is not compared, it was measured") < text.index("less time a step") < text.index("<main>")


def test_memory_of_one_strategy_that_was_watched_in_another_way(run: Path, tmp_path: Path) -> None:
    """Only that strategy's memory is left out."""
    metered = [account("native/nothing", rank, 0.5, MallocMeter.method).model_dump(mode="json") for rank in (0, 1)]
    later = edit_example_comparison(
        write_example_comparison(tmp_path / "later", scale=0.5),
        lambda data: data["strategies"][1].update(memory=metered),
    )
    before, now = ComparisonPageData.read(run), ComparisonPageData.read(later)
    (said,) = changes.describe_mismatches(before, now)
    assert said.startswith("Memory of native/nothing is not compared, it was measured in two ways: torch's own")
    rows = {row[0]: row[3] for row in changes.change_rows(changes.without_incomparable_memory(before, now), now)}
    assert (rows["native/nothing"], rows["native/parameters"]) == ("-", "-50.0 %")


def test_another_task_with_another_model_is_refused(run: Path, tmp_path: Path) -> None:
    """The error names both tasks, and no page is written."""
    later = write_example_comparison(tmp_path / "later", use="/x/gan.py:Gan", parameters=263_000)
    with pytest.raises(errors.ReportError) as e:
        write_page(run, later)
    assert str(e.value) == (
        f"{run}/compare and {later}/compare trained different things (char_gpt.py:CharGPT with 8,926,848 parameters "
        "and gan.py:Gan with 263,000 parameters) and cannot be compared: give one of them, or two of the same task "
        "(the same file name and class)"
    )
    assert not (later / "compare/report.html").exists()


def test_a_task_or_a_model_that_is_not_known_is_not_refused(run: Path, tmp_path: Path) -> None:
    """Facts that are unknown, because a config or a run log is missing, are not compared."""
    later = write_example_comparison(tmp_path / "later", use="/x/gan.py:Gan", parameters=0)
    assert changes.describe_different_tasks(ComparisonPageData.read(run), ComparisonPageData.read(later)) == ""
    (later / "compare/asked/quickstart.json").unlink()
    assert changes.describe_mismatches(ComparisonPageData.read(run), ComparisonPageData.read(later)) == []


def test_two_runs_that_are_not_alike(tmp_path: Path) -> None:
    """Mismatches of runs come from configs and first events; another task with another model is refused."""
    one, two = plain(tmp_path / "one"), plain(tmp_path / "two")

    def retold(**told: Any) -> None:
        config = json.loads((two / "config.json").read_text("utf-8"))
        (two / "config.json").write_text(json.dumps(config | told), encoding="utf-8")

    retold(batch={"total": 8}, train={"precision": "bf16-mixed"})
    run_log = two / "rank-0.jsonl"
    run_log.write_text(
        run_log.read_text("utf-8").replace("8926848", "1000").replace("native/nothing", "native/gradients")
    )
    text = write_page(one, two).read_text("utf-8")
    head = text[: text.index("</header>")]
    assert "The two differ: parameters 8,926,848 before, 1,000 now; " in head
    assert "strategy native/nothing before, native/gradients now" in head
    retold(task={"use": "gan.py:Gan"})
    with pytest.raises(errors.ReportError, match=r"and gan.py:Gan with 1,000 parameters\) and cannot be compared"):
        write_page(one, two)
