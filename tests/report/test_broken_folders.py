"""report.html of damaged folders: what cannot be read is named in a sentence."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.comparisons import PARAMETER_COUNT, account, edit_example_comparison, write_example_comparison
from unipar.errors import ReportError
from unipar.report.build import try_write_page, write_page
from unipar.report.data.comparison_data import ComparisonPageData
from unipar.report.pages.comparison_page import render_comparison
from unipar.results.spreadsheet import format_comparison_csv


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_example_comparison(tmp_path / "run")


def test_a_strategy_that_was_not_watched_has_no_memory_anywhere(run: Path) -> None:
    """Accounts that a rank left in the strategy's folder are in no figure, no sentence and no column."""
    for rank in (0, 1):
        account("native/parameters", rank, 0.1).write(run / "compare/native-parameters")
    told = ComparisonPageData.read(
        edit_example_comparison(
            run, lambda data: data["strategies"][2].update(memory=[], note="memory was not recorded")
        )
    )
    assert "native/parameters" not in [strategy.strategy for strategy in told.measured_strategies]
    text = render_comparison(told)
    assert "<h1>deepspeed/gradients is smallest" in text
    assert "<p>Not measured: native/parameters.</p>" in text
    assert (
        '<th scope="row" class="text">native/parameters</th><td class="text">7 digits</td><td>826 ms</td>'
        "<td>1.57</td><td>9.7</td><td>–</td><td>~640 MiB</td><td>–</td>"
    ) in text


def test_the_figures_alone_have_all_that_was_measured(run: Path, tmp_path: Path) -> None:
    """Memory is read from compare.json, even if the strategy's folder is missing or its accounts are truncated."""
    (run / "compare/native-nothing/rank-1.memory.json").write_text('{"rank": 1', encoding="utf-8")
    whole = ComparisonPageData.read(run)
    assert whole.problems == ()
    bare = tmp_path / "bare"
    bare.mkdir()
    (run / "compare/compare.json").rename(bare / "compare.json")
    told = ComparisonPageData.read(bare)
    assert [strategy.memory for strategy in told.strategies] == [strategy.memory for strategy in whole.strategies]
    assert [len(strategy.memory) for strategy in told.strategies] == [1, 2, 2, 2, 2, 2, 0]
    sections = re.findall('<section id="([a-z]+)">', render_comparison(told))
    assert sections == [
        *("memory", "strategies", "bridge", "through", "balance", "planned", "losses", "pareto", "times", "sent", "how")
    ]


def test_a_rank_without_an_account_is_a_rank_all_the_same(run: Path) -> None:
    """The prediction for CUDA includes 200 MiB for NCCL with several ranks, and none for one process."""
    data = edit_example_comparison(run, lambda data: data["strategies"][1]["memory"].pop())
    told = ComparisonPageData.read(data)
    text = render_comparison(told)
    assert [told.comparison.rank_count(row) for row in told.comparison.rows[:3]] == [1, 2, 2]
    assert "<td>178 MiB</td><td>190 MiB</td><td>878 MiB</td>" in text
    assert "<td>143 MiB</td><td>154 MiB</td><td>644 MiB</td>" in text
    lines = {line.split()[0]: line.split("MiB") for line in told.comparison.tables(100)[2] if line.endswith("MiB")}
    assert (lines["native/nothing"][2], lines["single"][2]) == ("  878 ", "  644 ")
    assert [line.split(",")[8] for line in format_comparison_csv(told.comparison).splitlines()[1:3]] == [
        "675282944",
        "920649728",
    ]


def test_the_ranks_are_known_before_any_has_started(run: Path) -> None:
    """The header names the ranks even after Ctrl-C at the start, and leaves them out if the file lacks them."""

    def stopped(data: dict[str, Any]) -> None:
        data["interrupted"] = True
        data["strategies"] = [{"strategy": c["strategy"], "outcome": "waits"} for c in data["strategies"]]

    told = ComparisonPageData.read(edit_example_comparison(run, stopped))
    assert [told.comparison.rank_count(row) for row in told.comparison.rows[:2]] == [1, 2]
    text = render_comparison(told)
    assert "unipar compare · quickstart · 2 ranks · fp32 · 8 samples a step" in text
    text = render_comparison(ComparisonPageData.read(edit_example_comparison(run, lambda data: data.pop("ranks"))))
    assert "unipar compare · quickstart · fp32 · 8 samples a step" in text


@pytest.mark.parametrize("phases", [[], None])
def test_an_account_without_phases_is_a_sentence(run: Path, phases: list[Any] | None) -> None:
    """Accounts always have the phase in which the model was built, so one without phases is refused."""
    edit_example_comparison(run, lambda data: data["strategies"][1]["memory"][1].update(phases=phases))
    with pytest.raises(ReportError) as e:
        write_page(run)
    why = "native/nothing has an account without phases"
    assert str(e.value) == (
        f"{run}/compare/compare.json is not a comparison written by unipar: {why}; "
        "run the command again with --overwrite"
    )


def test_a_truncated_run_log_or_config_leaves_the_rest(run: Path) -> None:
    """The number of parameters comes from the other strategies; both files are named as problems."""
    (run / "compare/single/rank-0.jsonl").write_text('{"event": "sta', encoding="utf-8")
    (run / "compare/single/config.json").write_text("[1", encoding="utf-8")
    told = ComparisonPageData.read(run)
    assert told.parameters == PARAMETER_COUNT
    run_log, config = told.problems
    assert run_log.startswith(
        f"{run}/compare/single/rank-0.jsonl cannot be read as a rank's run log (JSONDecodeError: "
    )
    assert config.startswith(f"{run}/compare/single/config.json cannot be read: it is truncated or not JSON (")


def test_a_foreign_run_log_or_config_is_a_sentence(run: Path) -> None:
    """Well-formed files with other content are named as problems: empty, another kind, a missing key."""
    (run / "compare/single/config.json").write_text('{"a": 1}', encoding="utf-8")
    why = {
        "single": ("", "it has no start event"),
        "native-nothing": ("[1]\n", "TypeError: list indices must be integers or slices, not str"),
        "native-parameters": ('{"event": "start"}\n', "KeyError: 'parameters'"),
        "deepspeed-gradients": ('{"event": "memory"}\n{"event": "start", "parameters": 9}\n', ""),
    }
    for strategy, (text, _) in why.items():
        (run / f"compare/{strategy}/rank-0.jsonl").write_text(text, encoding="utf-8")
    told = ComparisonPageData.read(run)
    said = [
        f"{run}/compare/{strategy}/rank-0.jsonl cannot be read as a rank's run log ({reason}): it is left out"
        for strategy, (_, reason) in why.items()
        if reason
    ]
    config = (
        f"{run}/compare/single/config.json is not a config written by unipar: none of its keys is a key of a config"
    )
    assert told.problems == (said[0], f"{config}; it is left out", *said[1:])
    assert [strategy.parameters for strategy in told.strategies] == [0, 0, 0, 9, PARAMETER_COUNT, PARAMETER_COUNT, 0]
    assert f'<p class="worry">{config}; it is left out</p>' in render_comparison(told)


def test_a_strategy_that_failed_before_it_began_has_an_empty_run_log(run: Path) -> None:
    """An empty run log of a failed strategy is not a problem."""
    (run / "compare/native-nothing/rank-0.jsonl").write_text("", encoding="utf-8")
    edit_example_comparison(run, lambda data: data["strategies"][1].update(outcome="failed", note="no"))
    assert ComparisonPageData.read(run).problems == ()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"name": "x"', "cannot be read: it is truncated or not JSON ("),
        ("[]", "is not a comparison: it holds no mapping"),
        ("{}", "is not a comparison written by unipar: no key 'strategies'"),
        (
            '{"cells": []}',
            "was written before unipar 0.1.0, which calls cells strategies: read it with the version that wrote it, or "
            "run the command again with --overwrite",
        ),
        ('{"strategies": []}', "is not a comparison written by unipar: no key 'name'"),
        ('{"strategies": 3}', "is not a comparison written by unipar: 'int' object is not iterable"),
    ],
)
def test_a_foreign_comparison_is_a_sentence(run: Path, text: str, sentence: str) -> None:
    """The error says what is wrong, and the file is not changed."""
    file = run / "compare/compare.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ReportError) as e:
        write_page(run)
    assert str(e.value).startswith(f"{file} {sentence}")
    assert file.read_text("utf-8") == text
    assert try_write_page(lambda: write_page(run / "compare")).startswith(f"no page: {file} {sentence}")


def test_foreign_figures_are_a_sentence(run: Path) -> None:
    """Losses that are words, losses of another number of steps, and an empty list of strategies are errors."""
    file = run / "compare/compare.json"
    edit_example_comparison(run, lambda data: data["strategies"][2].update(losses=["a", "b"]))
    with pytest.raises(ReportError, match="is not a comparison written by unipar: 2 validation errors for "):
        ComparisonPageData.read(run)
    edit_example_comparison(run, lambda data: data["strategies"][2].update(losses=[1.0]))
    said = "is not a comparison written by unipar: native/parameters has 1 losses, single has 12"
    with pytest.raises(ReportError, match=re.escape(f"{file} {said}")):
        ComparisonPageData.read(run)
    edit_example_comparison(
        run, lambda data: (data.update(samples="many"), data["strategies"][2].update(losses=[1.0] * 12))
    )
    with pytest.raises(ReportError, match="1 validation error for Comparison"):
        ComparisonPageData.read(run)
    edit_example_comparison(run, lambda data: data.update(samples=8, strategies=[]))
    with pytest.raises(ReportError, match="is not a comparison written by unipar: it has no strategies"):
        ComparisonPageData.read(run)


def test_a_page_that_cannot_be_written_is_a_sentence(run: Path) -> None:
    """No temporary file stays, and compare goes on with the sentence."""
    (run / "compare/report.html").mkdir()
    (run / "compare/report.html/x").touch()
    with pytest.raises(ReportError) as e:
        write_page(run)
    assert str(e.value) == (
        f"{run}/compare/report.html cannot be written: Is a directory; give another path by --out FILE"
    )
    assert try_write_page(lambda: write_page(run / "compare")) == f"no page: {e.value}"
    with pytest.raises(
        ReportError,
        match=r"no/where\.html cannot be written: No such file or directory; give another path by --out FILE",
    ):
        write_page(run, out=run / "no/where.html")
    assert list(run.glob("**/.report*")) == []
