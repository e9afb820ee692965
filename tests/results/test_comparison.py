"""Tables and verdicts of compared strategies, and the files that hold them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.compared_rows import FAR, ONE, SAME, compared, marks, ran
from unipar import errors
from unipar.comparison import store
from unipar.comparison.compare import describe_comparison_errors
from unipar.report.data.comparison_data import ComparisonPageData
from unipar.results.comparison import Comparison
from unipar.results.loss_agreement import measure_agreement
from unipar.results.row import (
    OLDER_REUSED,
    StrategyResult,
)
from unipar.results.scaling import ScaledStrategy, Scaling


def scaled(row: StrategyResult, **changed: Any) -> Scaling:
    told: dict[str, Any] = {"name": "x", "out": "o", "precision": "fp32", "warmup": 2, "cores": 2, "threads": "1"}
    world = ScaledStrategy(strategy="native/nothing", ranks=1, kinds=("strong",), samples=8, micro=8, accumulate=1)
    return Scaling(rows=[row.changed(strategy=world.name)], worlds=(world,), device="cpu", **(told | changed))


NEAR = ran("native/parameters", [4.0, 3.5000007, 3.0], 15.0)


# The table


def test_the_table_fits_eighty_columns() -> None:
    """The answer, figures in their columns, a refusal as a sentence in its row, then what the columns mean."""
    refused = StrategyResult(
        strategy="accelerate/parameters", outcome="refused", note="its FSDP2 is not there yet; " * 3
    )
    gone = StrategyResult(
        strategy="horovod/nothing",
        outcome="absent",
        note="backend 'horovod' needs horovod, not installed here: unipar install horovod",
    )
    long = NEAR.changed(strategy="deepspeed/gradients+library")
    text = compared(ONE, SAME, long, refused, gone).table()
    assert text.splitlines() == [
        "all 2 strategies agree with one process to 6 digits or more, over 3 steps",
        "loss of one process: 4.0000 at step 1, 3.0000 at step 3",
        "",
        "strategy                     loss           step ms     x  samples/s      RSS",
        "single                       reference  20 [20..25]  2.00        400  600 MiB",
        "native/nothing               same bits  10 [10..12]  1.00        800  600 MiB",
        "deepspeed/gradients+library  6 digits   15 [15..19]  1.50        533  600 MiB",
        "accelerate/parameters        refused: its FSDP2 is not there yet; its FSDP2 is",
        "                             not there yet; its FSDP2 is not there yet;",
        "horovod/nothing              backend 'horovod' needs horovod, not installed",
        "                             here: unipar install horovod",
        "step ms: median [middle half] of 4 steps in 2 turns, of the slowest rank",
        "x: step time in proportion to native/nothing",
        "RSS: peak of the largest rank; not for ranking: allocators keep freed memory",
    ]


def test_a_table_that_would_be_too_wide_leaves_x_out() -> None:
    """Steps of seconds have longer figures."""
    slow = SAME.changed(strategy="deepspeed/gradients+library", seconds=[[1.2, 1.5, 1.6]])
    lines = compared(ONE.changed(seconds=[[1.1]]), slow).table().splitlines()
    assert lines[3].split() == ["strategy", "loss", "step", "ms", "samples/s", "RSS"]
    assert not any(line.startswith("x:") for line in lines)
    assert max(map(len, lines)) <= 80


def test_a_remark_belongs_to_a_column_by_its_field() -> None:
    """A note that begins like a column's name is shown where the table has not that column."""
    said = "RSS: this is what somebody wrote"
    slow = SAME.changed(strategy="deepspeed/gradients+library", seconds=[[1.2, 1.5, 1.6]])
    found = compared(ONE.changed(seconds=[[1.1]]), slow, note="x: " + said)
    lines = found.table().splitlines()
    assert "x" not in lines[3].split()
    assert f"x: {said}" in lines
    assert [r.column for r in found.column_remarks() if r.column] == ["x", "RSS"]


def test_a_disagreement_is_said_and_is_a_failure() -> None:
    """Which strategy, which step, both losses and what was allowed."""
    found = compared(ONE, SAME, FAR)
    assert found.code == 1
    assert (
        "DISAGREES: deepspeed/gradients by 1.0e-01 at step 3: 3.1 instead of 3; allowed in fp32: 2e-06"
        in found.remarks()
    )
    assert found.tables(80)[0][3].split()[:3] == ["deepspeed/gradients", "1", "digit!"]


def test_frozen_weights_of_few_bits_have_the_tolerance_of_bf16() -> None:
    """As `single` computes; a strategy that multiplies in bf16 by itself gets none of it."""
    near = SAME.changed(losses=[4.0, 3.5, 3.01])
    for computed, allowed in ((("bfloat16", "float32"), 5e-3), (("float32", "float32 under autocast"), 2e-6)):
        mine, other = marks(computed=computed), marks(computed=("bfloat16",))
        found = compared(ONE.changed(marks=mine), near.changed(marks=other))
        assert found.agreement(found.rows[1]) == measure_agreement([4.0, 3.5, 3.01], ONE.losses, allowed)
    assert found.judged_as == "fp32"
    assert (
        compared(ONE.changed(marks=marks(computed=("bfloat16",))), precision="bf16-master").judged_as == "bf16-master"
    )


def test_parts_are_held_one_by_one() -> None:
    """Two parts that are off by the same amount in opposite directions are found, though the sum is equal."""
    one = ONE.changed(parts={"a": [1.0, 2.0], "b": [2.0]})
    found = compared(
        one, SAME.changed(parts={"a": [1.0, 2.00001], "b": [1.9]}), SAME.changed(strategy="x", parts=one.parts)
    )
    assert found.code == 1
    assert (
        "DISAGREES: native/nothing by 1.0e-01 at step 1 of b: 1.9 instead of 2; allowed in fp32: 2e-06"
        in found.remarks()
    )
    assert [str(found.agreement(row)) for row in found.rows[1:]] == ["1 digit", "same bits"]


@pytest.mark.parametrize(
    ("rows", "code"),
    [
        ([ONE, SAME], 0),
        (
            [
                ONE,
                SAME,
                StrategyResult(strategy="b", outcome="refused"),
                StrategyResult(strategy="c", outcome="absent"),
            ],
            0,
        ),
        ([ONE, SAME, StrategyResult(strategy="b", outcome="failed")], 1),
        ([ONE, StrategyResult(strategy="b", outcome="refused")], 1),
        ([StrategyResult(strategy="single", outcome="failed"), SAME], 1),
    ],
)
def test_refusals_are_an_answer_and_failures_are_not(rows: list[StrategyResult], code: int) -> None:
    """At least one strategy has to have been held to the one process."""
    assert compared(*rows).code == code


def test_an_interrupted_comparison_shows_what_it_has() -> None:
    """Times of the turns that were taken, and the code of a signal."""
    half = SAME.changed(outcome="waits", losses=[], seconds=[[0.01]], peak_rss=[])
    found = compared(ONE.changed(outcome="waits", losses=[], peak_rss=[]), half, interrupted=True)
    assert found.code == 130
    assert found.tables(80)[0][2].split() == ["native/nothing", "-", "10", "[10..10]", "1.00", "800", "-"]
    assert "interrupted: strategies without figures did not finish" in str(found)


# What is kept

OF = {
    "config": "a",
    "strategies": ["single", "native/nothing"],
    "task": "b",
    "versions": {"torch": "2"},
    "machine": "c",
    "memory": "",
}


def test_a_finished_comparison_is_read_again(tmp_path: Path) -> None:
    """Every figure survives."""
    found = compared(ONE, SAME)
    store.write_comparison(tmp_path, OF, found)
    assert store.reuse_or_clear(tmp_path, OF, overwrite=False) == found


@pytest.mark.parametrize("note", [OLDER_REUSED, f"in fp32; {OLDER_REUSED}", "in fp32", ""])
def test_an_older_file_says_in_its_note_that_a_row_was_reused(note: str) -> None:
    """Older files have no field for that; in newer ones the note decides nothing."""
    told = ONE.changed(note=note, reused=False).model_dump(mode="json")
    assert StrategyResult.read(told).reused is False
    del told["reused"]
    assert StrategyResult.read(told).reused is (OLDER_REUSED in note)


@pytest.mark.parametrize("text", ['{"of": {"ce', '{"of": {}}', "[]"])
def test_a_truncated_comparison_is_replaced_only_when_asked(tmp_path: Path, text: str) -> None:
    """Without --overwrite it is an error, and the file stays."""
    file = tmp_path / "compare.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(errors.OutExists) as e:
        store.reuse_or_clear(tmp_path, OF, overwrite=False)
    assert str(e.value) == (
        f"{file} is truncated or was not written by unipar: give --overwrite to replace it, or another out"
    )
    assert file.read_text("utf-8") == text
    assert store.reuse_or_clear(tmp_path, OF, overwrite=True) is None
    assert not file.exists()


def test_a_comparison_of_which_nothing_is_whole_runs_anew(tmp_path: Path) -> None:
    """A failed strategy may run today, also with other versions of its library."""
    store.write_comparison(
        tmp_path,
        OF,
        compared(ONE.changed(outcome="waits"), StrategyResult(strategy="native/nothing", outcome="failed")),
    )
    (tmp_path / "native-nothing").mkdir()
    assert store.reuse_or_clear(tmp_path, OF | {"versions": {"torch": "3"}}, overwrite=False) is None
    assert list(tmp_path.iterdir()) == []


def test_what_is_whole_is_kept(tmp_path: Path) -> None:
    """The other strategies' folders go; a library that was installed since is no other comparison."""
    found = compared(ONE, StrategyResult(strategy="native/nothing", outcome="failed", note="rank 1 died"))
    store.write_comparison(tmp_path, OF, found)
    for name in ("single", "native-nothing"):
        (tmp_path / name).mkdir()
    assert store.reuse_or_clear(tmp_path, OF | {"versions": {"torch": "2", "more": "1"}}, overwrite=False) == found
    assert sorted(path.name for path in tmp_path.iterdir()) == ["compare.csv", "compare.json", "single"]
    with pytest.raises(errors.OutExists) as e:
        store.reuse_or_clear(tmp_path, OF | {"versions": {"torch": "3"}}, overwrite=False)
    assert str(e.value) == (
        f"{tmp_path} holds another comparison (other versions): give --overwrite to replace it, or another out"
    )
    assert (tmp_path / "single").exists()
    assert store.reuse_or_clear(tmp_path, OF, overwrite=True) is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("key", ["config", "strategies", "task", "weights", "threads", "versions", "machine", "memory"])
def test_another_comparison_is_not_overwritten_unasked(tmp_path: Path, key: str) -> None:
    """The message says in what it differs; --overwrite clears it away."""
    store.write_comparison(tmp_path, OF, compared(ONE, SAME))
    other = OF | {key: {"torch": "3"} if key == "versions" else "other"}
    with pytest.raises(errors.OutExists) as e:
        store.reuse_or_clear(tmp_path, other, overwrite=False)
    assert str(e.value) == (
        f"{tmp_path} holds another comparison (other {key}): give --overwrite to replace it, or another out"
    )
    assert store.reuse_or_clear(tmp_path, other, overwrite=True) is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("finished", [True, False])
def test_memory_that_was_watched_otherwise_is_not_set_beside_this(tmp_path: Path, finished: bool) -> None:
    """A compiler came between two goes: what the strategies of the first hold is counted in another way."""
    left = SAME if finished else SAME.changed(outcome="failed")
    store.write_comparison(tmp_path, OF | {"memory": "of torch's own tensors"}, compared(ONE, left))
    with pytest.raises(errors.OutExists) as e:
        store.reuse_or_clear(tmp_path, OF | {"memory": ""}, overwrite=False)
    assert str(e.value) == (
        f"{tmp_path} holds another comparison (other memory): give --overwrite to replace it, or another out"
    )


@pytest.mark.parametrize(
    ("older", "now"),
    [
        (
            "memory was watched in 1 step, so that what a step sends was not seen: train.steps: 6 leaves no more; "
            "10 would",
            "memory was recorded in 1 step, communication in none: train.steps: 6 leaves no more; 10 steps are enough",
        ),
        (
            "memory was not watched: train.steps: 5 leaves no step for it beside those that are timed",
            "memory was not recorded: train.steps: 5 leaves no step for it besides the timed ones",
        ),
        ("memory was not watched: of the host, no compiler", "the host's memory was not recorded: no compiler"),
        (
            "of memory torch's own tensors alone were watched: no compiler",
            "memory was recorded of torch's own tensors only: no compiler",
        ),
    ],
)
def test_older_words_on_memory_are_the_same_comparison(tmp_path: Path, older: str, now: str) -> None:
    """The sentences in a file are those of the version that wrote it."""
    found = compared(ONE, SAME)
    store.write_comparison(tmp_path, OF | {"memory": older}, found)
    assert store.reuse_or_clear(tmp_path, OF | {"memory": now}, overwrite=False) == found


def _no_versions(data: dict[str, Any]) -> None:
    del data["of"]["versions"]


def _no_strategies(data: dict[str, Any]) -> None:
    data["strategies"] = []


def _fewer_losses(data: dict[str, Any]) -> None:
    data["strategies"][1]["losses"] = [1.0]


def _no_losses(data: dict[str, Any]) -> None:
    for strategy in data["strategies"]:
        strategy["losses"] = []


def _words_for_seconds(data: dict[str, Any]) -> None:
    data["strategies"][1]["seconds"] = [["a"]]


def _no_seconds(data: dict[str, Any]) -> None:
    data["strategies"][1]["seconds"] = []


def _no_time(data: dict[str, Any]) -> None:
    data["strategies"][1]["seconds"] = [[0.0]]


@pytest.mark.parametrize(
    "spoil",
    [_no_strategies, _fewer_losses, _no_losses, _words_for_seconds, _no_seconds, _no_time],
    ids=lambda f: f.__name__,
)
def test_a_file_of_somebody_else_is_no_earlier_comparison(
    tmp_path: Path, spoil: Callable[[dict[str, Any]], None]
) -> None:
    """Both the page and a new comparison report it; with --overwrite it is removed."""
    store.write_comparison(tmp_path, OF, compared(ONE, SAME))
    file = tmp_path / store.COMPARE_JSON
    data = json.loads(file.read_text("utf-8"))
    spoil(data)
    file.write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(errors.OutExists) as e:
        store.reuse_or_clear(tmp_path, OF, overwrite=False)
    assert str(e.value) == (
        f"{file} is truncated or was not written by unipar: give --overwrite to replace it, or another out"
    )
    with pytest.raises(errors.ReportError, match="is not a comparison written by unipar: "):
        ComparisonPageData.read(file)
    assert store.reuse_or_clear(tmp_path, OF, overwrite=True) is None
    assert list(tmp_path.iterdir()) == []


def test_an_older_file_that_says_less_is_another_comparison(tmp_path: Path) -> None:
    """A missing value may have been anything."""
    store.write_comparison(tmp_path, OF, compared(ONE, SAME))
    file = tmp_path / store.COMPARE_JSON
    data = json.loads(file.read_text("utf-8"))
    _no_versions(data)
    file.write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(errors.OutExists, match=r"holds another comparison \(other versions\)"):
        store.reuse_or_clear(tmp_path, OF, overwrite=False)


def test_what_cannot_be_written_leaves_what_was_there(tmp_path: Path) -> None:
    """No half of a file either; the sentence has the file's name and the system's word."""
    (tmp_path / store.COMPARE_JSON).mkdir()
    said = store.write_or_explain(tmp_path, lambda: store.write_comparison(tmp_path, OF, compared(ONE, SAME)))
    assert said == f"the results could not be written: {tmp_path}/compare.json (Is a directory)"
    assert list(tmp_path.iterdir()) == [tmp_path / store.COMPARE_JSON]


def test_the_failure_of_what_others_are_held_to_is_said() -> None:
    """In a table of several sizes it has no row of its own."""
    rows = [
        StrategyResult(strategy="single", outcome="failed", note="rank 0 was killed\nits log"),
        StrategyResult(strategy="x", outcome="ran"),
    ]
    assert describe_comparison_errors(compared(*rows)) == [
        "single, the reference for the other strategies, failed: rank 0 was killed"
    ]
    assert describe_comparison_errors(compared(ONE, SAME)) == []


@pytest.mark.parametrize("found", [compared(ONE, SAME, unkept="no room"), scaled(ONE, unkept="no room")])
def test_what_could_not_be_kept_is_shown_and_said(found: Comparison | Scaling) -> None:
    """With the figures, and with an exit code that tells; it is no part of what is kept."""
    assert "\nno room" in found.table()
    assert " 20 " in found.table()
    assert found.code == 1
    assert found.changed(unkept="").code == 0
    assert "unkept" not in found.model_dump(mode="json")


def test_a_folder_of_somebody_else_is_never_cleared(tmp_path: Path) -> None:
    """Not even with --overwrite."""
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(errors.OutExists, match=r"exists and holds no compare\.json: move it away, or give another out"):
        store.reuse_or_clear(tmp_path, OF, overwrite=True)
    assert (tmp_path / "thesis.tex").exists()
