"""report.html of folders that are not as they should be: a sentence for what cannot be read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.comparisons import P, account, made, rewritten
from unipar.errors import ReportError
from unipar.report.page import page
from unipar.report.seen import Told
from unipar.verbs.report import beside, report


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return made(tmp_path / "run")


def test_a_truncated_account_leaves_the_rest(run: Path) -> None:
    """A sentence on the page; the other ranks and cells are shown."""
    cut = run / "compare/native-parameters/rank-0.memory.json"
    cut.write_bytes(cut.read_bytes()[:500])
    foreign = run / "compare/native-nothing/rank-1.memory.json"
    account("native/nothing", 7).write(foreign.parent)
    (foreign.parent / "rank-7.memory.json").replace(foreign)
    told = Told.read(run)
    assert told.problems == (
        f"{foreign} tells of rank 7: it is left out",
        f"{cut} is not the account of a rank's memory (the whole file: Invalid JSON: EOF while parsing a string at "
        "line 1 column 500): it is left out",
    )
    assert [len(cell.memory) for cell in told.cells] == [1, 1, 1, 2, 2, 2, 0]
    assert f'<p class="worry">{cut} is not the account of a rank&#x27;s memory (the whole' in page(told)


def test_a_truncated_ledger_or_config_leaves_the_rest(run: Path) -> None:
    """Parameters come from the other cells; the config's sentence is on the page."""
    (run / "compare/single/rank-0.jsonl").write_text('{"event": "sta', encoding="utf-8")
    (run / "compare/single/config.json").write_text("[1", encoding="utf-8")
    told = Told.read(run)
    assert told.parameters == P
    ledger, config = told.problems
    assert ledger.startswith(f"{run}/compare/single/rank-0.jsonl cannot be read as a rank's ledger (JSONDecodeError: ")
    assert config.startswith(f"{run}/compare/single/config.json cannot be read: it is cut short or is no JSON (")


def test_a_foreign_ledger_or_config_is_a_sentence(run: Path) -> None:
    """Well-formed, and not what unipar writes: emptied, of something else, without what is read from it."""
    (run / "compare/single/config.json").write_text('{"a": 1}', encoding="utf-8")
    why = {
        "single": ("", "no start of a run is in it"),
        "native-nothing": ("[1]\n", "TypeError: list indices must be integers or slices, not str"),
        "native-parameters": ('{"event": "start"}\n', "KeyError: 'parameters'"),
        "deepspeed-gradients": ('{"event": "memory"}\n{"event": "start", "parameters": 9}\n', ""),
    }
    for cell, (text, _) in why.items():
        (run / f"compare/{cell}/rank-0.jsonl").write_text(text, encoding="utf-8")
    told = Told.read(run)
    said = [
        f"{run}/compare/{cell}/rank-0.jsonl cannot be read as a rank's ledger ({reason}): it is left out"
        for cell, (_, reason) in why.items()
        if reason
    ]
    config = f"{run}/compare/single/config.json is no config that unipar wrote: no key of it is one of a config"
    assert told.problems == (said[0], f"{config}; it is left out", *said[1:])
    assert [cell.parameters for cell in told.cells] == [0, 0, 0, 9, P, P, 0]
    assert f'<p class="worry">{config}; it is left out</p>' in page(told)


def test_a_cell_that_failed_before_it_began_has_an_empty_ledger(run: Path) -> None:
    """Nothing is left out there."""
    (run / "compare/native-nothing/rank-0.jsonl").write_text("", encoding="utf-8")
    rewritten(run, lambda data: data["cells"][1].update(outcome="failed", note="no"))
    assert Told.read(run).problems == ()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"name": "x"', "cannot be read: it is cut short or is no JSON ("),
        ("[]", "is no comparison: it holds no mapping"),
        ("{}", "is no comparison that unipar wrote: no key 'cells'"),
        ('{"cells": []}', "is no comparison that unipar wrote: no key 'name'"),
        ('{"cells": 3}', "is no comparison that unipar wrote: 'int' object is not iterable"),
    ],
)
def test_a_foreign_comparison_is_a_sentence(run: Path, text: str, sentence: str) -> None:
    """It is not touched."""
    file = run / "compare/compare.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ReportError) as e:
        report(run)
    assert str(e.value).startswith(f"{file} {sentence}")
    assert file.read_text("utf-8") == text
    assert beside(lambda: report(run / "compare")).startswith(f"no page: {file} {sentence}")


def test_foreign_figures_are_a_sentence(run: Path) -> None:
    """Losses that are words; losses of another number of steps; no cells at all."""
    file = run / "compare/compare.json"
    rewritten(run, lambda data: data["cells"][2].update(losses=["a", "b"]))
    with pytest.raises(ReportError, match="is no comparison that unipar wrote: 2 validation errors for "):
        Told.read(run)
    rewritten(run, lambda data: data["cells"][2].update(losses=[1.0]))
    said = "is no comparison that unipar wrote: native/parameters has 1 losses, single has 12"
    with pytest.raises(ReportError, match=re.escape(f"{file} {said}")):
        Told.read(run)
    rewritten(run, lambda data: (data.update(samples="many"), data["cells"][2].update(losses=[1.0] * 12)))
    with pytest.raises(ReportError, match="1 validation error for Comparison"):
        Told.read(run)
    rewritten(run, lambda data: data.update(samples=8, cells=[]))
    with pytest.raises(ReportError, match="is no comparison that unipar wrote: it has no cells"):
        Told.read(run)


def test_a_page_that_cannot_be_written_is_a_sentence(run: Path) -> None:
    """Nothing half written stays, and compare goes on with the sentence."""
    (run / "compare/report.html").mkdir()
    (run / "compare/report.html/x").touch()
    with pytest.raises(ReportError) as e:
        report(run)
    assert str(e.value) == (
        f"{run}/compare/report.html cannot be written: Is a directory; --out FILE takes another place"
    )
    assert beside(lambda: report(run / "compare")) == f"no page: {e.value}"
    with pytest.raises(ReportError, match=r"no/where\.html cannot be written: No such file or directory; --out FILE"):
        report(run, out=run / "no/where.html")
    assert list(run.glob("**/.report*")) == []
