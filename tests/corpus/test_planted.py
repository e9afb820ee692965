"""Errors of our own that are planted in a copy of the code: each has its place and its test, and is found or not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.corpus.planted import FAULTS, ROOT, Planted, copy_code, look_for

FOUND_BY = "tests/config/test_schedule.py::test_a_warm_up_before_falls"


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.fault)
def test_each_has_its_place_and_its_test(fault: Planted) -> None:
    """The file has the text once, and the test is there; whether it fails is for `make planted` to show."""
    assert (ROOT / fault.file).read_text("utf-8").count(fault.old) == 1
    file, _, test = fault.found_by.partition("::")
    assert f"def {test.partition('[')[0]}(" in (ROOT / file).read_text("utf-8")


def test_what_becomes_of_a_fault(tmp_path: Path) -> None:
    """Its test fails; a test that still passes, or ends otherwise, has not found it; the copy is as before."""
    copy_code(tmp_path)
    file = "unipar/config/sections/schedule.py"
    before = (tmp_path / file).read_text("utf-8")
    warmup = "rise = (step + 1) / warmup if step < warmup else 1.0"

    def result(new: str) -> str:
        return look_for(Planted("", file, warmup, new, FOUND_BY), tmp_path)

    assert result("rise = 1.0") == "found"
    assert result(f"{warmup}  # harmless").startswith("not found: 1 passed")
    assert result("rise = unknown").startswith("the test ended otherwise: 1 failed")
    assert (tmp_path / file).read_text("utf-8") == before


def test_text_that_is_not_there(tmp_path: Path) -> None:
    """An edit without its one place is an error of the table."""
    (tmp_path / "a.py").write_text("1\n1\n", "utf-8")
    with pytest.raises(ValueError, match=r"^a.py has 2 times what is to be replaced: '1'$"):
        look_for(Planted("", "a.py", "1", "2", FOUND_BY), tmp_path)
