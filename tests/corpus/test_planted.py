"""Errors of our own that are planted in a copy of the code: each has its place and its test, and is found or not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.corpus.planted import FAULTS, GROUPS, ROOT, copy_code, look_for
from tests.corpus.planted_fault import Planted


@pytest.mark.parametrize("fault", [f for group in GROUPS.values() for f in group], ids=lambda fault: fault.fault)
def test_each_has_its_place_and_its_test(fault: Planted) -> None:
    """The file has the text once, and the test is there; whether it fails is for `make planted` to show."""
    assert (ROOT / fault.file).read_text("utf-8").count(fault.old) == 1
    file, _, test = fault.found_by.partition("::")
    assert f"def {test.partition('[')[0]}(" in (ROOT / file).read_text("utf-8")


def test_one_of_them_is_found(tmp_path: Path) -> None:
    """The test runs on the copy, in which the fault is."""
    copy_code(tmp_path)
    assert look_for(next(fault for fault in FAULTS if fault.file == "unipar/results/verdicts.py"), tmp_path) == "found"


def test_what_becomes_of_a_fault(tmp_path: Path) -> None:
    """A test that still passes, or that ends with another error, has not found it; the copy is as before."""
    (tmp_path / "rates.py").write_text("RATE = 1\n", "utf-8")
    (tmp_path / "test_rate.py").write_text("def test_rate():\n    import rates\n    assert rates.RATE == 1\n", "utf-8")

    def result(new: str) -> str:
        return look_for(Planted("", "rates.py", "RATE = 1", new, "test_rate.py::test_rate"), tmp_path)

    assert result("RATE = 2") == "found"
    assert result("RATE = 1  # harmless").startswith("not found: 1 passed")
    assert result("RATE = unknown").startswith("the test ended otherwise: 1 failed")
    assert (tmp_path / "rates.py").read_text("utf-8") == "RATE = 1\n"


def test_text_that_is_not_there(tmp_path: Path) -> None:
    """An edit without its one place is an error of the table."""
    (tmp_path / "a.py").write_text("1\n1\n", "utf-8")
    with pytest.raises(ValueError, match=r"^a.py has 2 times what is to be replaced: '1'$"):
        look_for(Planted("", "a.py", "1", "2", ""), tmp_path)
