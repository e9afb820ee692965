"""Results that files hold: copies with other values, and the sentence on a file that holds none."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.support.compared_rows import compared
from unipar.errors import ReportError
from unipar.results.comparison import Comparison
from unipar.results.row import StrategyResult
from unipar.results.stored import parse_result

AGAIN = "run the command again with --overwrite"
FILE = Path("row.json")
ROW: dict[str, Any] = {"strategy": "single", "outcome": "ran", "losses": [1.0], "agreement": None}


def test_a_row_is_read_and_written_alike() -> None:
    """A key for readers of the file is left out; numbers that JSON does not have stay what they are."""
    row = parse_result(StrategyResult, FILE, ROW, "a row").changed(losses=[1.0, math.inf])
    assert "agreement" not in row.model_dump(mode="json")
    assert StrategyResult.read(row.model_dump(mode="json")) == row
    found = compared(row)
    again = Comparison.read(json.loads(json.dumps(found.model_dump(mode="json"))))
    assert again == found
    assert again.rows[0].losses == [1.0, math.inf]


def test_no_field_is_invented() -> None:
    """A name that the class lacks is an error of the caller."""
    with pytest.raises(AssertionError):
        StrategyResult.read(ROW).changed(loses=[])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"outcome": "won"}, "1 validation error for StrategyResult"),
        ({"memory": [{"phases": []}]}, "single has an account without phases"),
        ({"losses": ["soon"], "started": "now"}, "2 validation errors for StrategyResult"),
    ],
)
def test_a_foreign_row_is_a_sentence(change: dict[str, Any], why: str) -> None:
    """The key, what a check says, or the number of errors."""
    with pytest.raises(ReportError) as error:
        parse_result(StrategyResult, FILE, ROW | change, "a row")
    assert str(error.value) == f"row.json is not a row written by unipar: {why}; {AGAIN}"


def test_a_missing_key_is_named() -> None:
    """The first one."""
    with pytest.raises(ReportError) as error:
        parse_result(StrategyResult, FILE, {}, "a row")
    assert str(error.value) == f"row.json is not a row written by unipar: no key 'strategy'; {AGAIN}"
