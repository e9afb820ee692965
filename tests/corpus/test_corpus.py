"""Silent errors of other libraries, from public threads: `verify` finds each and names its kind and place."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from tests.corpus.cases import CASES, MISSED
from tests.corpus.page import PAGE, counts, order_of_rows, row_of, row_of_missed, rows_of_page, thread_link
from tests.corpus.verifying import Verified, place_of, verify_cases
from tests.support.forks import Forks

EACH = [pytest.param(name, marks=[] if case.always else [pytest.mark.sweep]) for name, case in CASES.items()]


@pytest.fixture(scope="module")
def verified(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, forks: Forks
) -> dict[str, Verified]:
    """Verify the cases that the collected tests ask for."""
    calls = (getattr(item, "callspec", None) for item in request.session.items)
    asked = {call.params.get("name") for call in calls if call is not None}
    return verify_cases(forks, tmp_path_factory.mktemp("corpus"), [name for name in CASES if name in asked])


@pytest.mark.parametrize("name", EACH)
def test_an_error_of_others_is_named(verified: dict[str, Verified], name: str) -> None:
    """The strategy disagrees, and its finding names the kind of fault and where it begins."""
    case, found = CASES[name], verified[name]
    assert found.verdict.outcome == "disagrees", found.verdict
    assert (found.finding.kind, place_of(found.finding)) == (case.kind, case.place), found.finding.says


@pytest.mark.parametrize("name", EACH)
def test_without_its_check_it_is_not_named(
    verified: dict[str, Verified], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the check of its kind taken out, the diagnosis of the same run does not name it."""
    kind, (module, _, function) = CASES[name].kind, CASES[name].check.rpartition(".")
    fault = verified[name].diagnose()
    assert fault is not None
    assert kind in (fault.name, *fault.candidates)

    def find_nothing(*args: Any) -> None:
        return None

    monkeypatch.setattr(importlib.import_module(f"unipar.verification.diagnosis.{module}"), function, find_nothing)
    without = verified[name].diagnose()
    assert without is None or kind not in (without.name, *without.candidates)


@pytest.mark.parametrize("name", EACH)
def test_the_page_has_what_was_found(verified: dict[str, Verified], name: str) -> None:
    """The row of the report is the one that this verification makes."""
    assert rows_of_page(PAGE.read_text("utf-8"))[thread_link(CASES[name].thread)] == row_of(CASES[name], verified[name])


def test_the_page_has_every_case() -> None:
    """The page has one row for each thread, in the order of the cases after those that are alive, and counts them."""
    text = PAGE.read_text("utf-8")
    rows = rows_of_page(text)
    assert list(rows) == order_of_rows()
    assert [rows[thread_link(error.thread)] for error in MISSED] == [row_of_missed(error) for error in MISSED]
    assert counts() in " ".join(text.split())


def test_each_engine_has_a_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """No engine of the corpus is without a thread, and no thread without an engine."""
    monkeypatch.syspath_prepend(Path(__file__).parent / "backend")
    assert set(importlib.import_module("corpus_backend.engines").ENGINES) == {"none", *CASES}
