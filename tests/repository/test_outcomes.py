"""Two runs of the tests, one on a bare machine and one of what did not run there: what CI makes of both."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.forks import PYTEST_WORDS, Forks
from tests.support.outcomes import Outcomes, judge
from tests.support.world import PYTHONPATH_VARIABLE

PLANTED = """
import subprocess
import pytest
from tests.support.programs import needs_programs

def test_plain():
    pass

@pytest.mark.xfail(strict=True)
def test_expected():
    assert False

@pytest.fixture
def broken():
    assert False

@pytest.mark.xfail(strict=True)
def test_expected_before_it_begins(broken):
    pass

@needs_programs("mpirun")
def test_that_says_so():
    subprocess.run(["mpirun"], check=True)

def test_that_does_not_say_so():
    subprocess.run(["mpirun"], check=True)
"""


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """Two tests that need mpirun, of which one says so; a folder `bin` has such a program."""
    (tmp_path / "test_planted.py").write_text(PLANTED, "utf-8")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/mpirun").write_text("#!/bin/sh\n", "utf-8")
    (tmp_path / "bin/mpirun").chmod(0o755)
    return tmp_path


def play(folder: Path, forks: Forks, path: Path, *words: str) -> int:
    environment = {**PYTHONPATH_VARIABLE, "PATH": str(path)}
    command = [*PYTEST_WORDS, "-p", "tests.conftest", f"--rootdir={folder}", *words]
    return forks.python(command, folder, environment).returncode


def test_a_test_that_needs_a_program_without_saying_so(planted: Path, forks: Forks) -> None:
    """It fails where the program is missing; the one that says so is played where the program is."""
    bare, here = planted / "bare.json", planted / "here.json"
    assert play(planted, forks, planted / "empty", f"--outcomes={bare}") == 1
    assert play(planted, forks, planted / "bin", f"--not-run-in={bare}", f"--outcomes={here}") == 0
    assert Outcomes.read(bare) == Outcomes(
        ran={
            "test_planted.py::test_plain": "passed",
            "test_planted.py::test_expected": "passed",
            "test_planted.py::test_expected_before_it_begins": "passed",
            "test_planted.py::test_that_does_not_say_so": "failed",
        },
        skipped={"test_planted.py::test_that_says_so": "no mpirun; on Debian: apt-get install openmpi-bin"},
    )
    assert Outcomes.read(here) == Outcomes(ran={"test_planted.py::test_that_says_so": "passed"})
    assert judge(Outcomes.read(bare), Outcomes.read(here)) == (
        [
            "4 tests ran on the bare machine and 1 here: 5 of 5",
            "  1 skipped on the bare machine: no mpirun; on Debian: apt-get install openmpi-bin",
            "failed on the bare machine: test_planted.py::test_that_does_not_say_so",
        ],
        1,
    )


BARE = Outcomes(ran={"a": "passed", "b": "passed"}, skipped={"c": "no srun", "d": "no GPU"})


@pytest.mark.parametrize(
    ("here", "lines", "code"),
    [
        (Outcomes({"c": "passed"}, {"d": "no GPU"}), ["  1 skipped on both: no GPU"], 0),
        (Outcomes({"d": "passed"}, {"c": "torch 2.13 lacks it"}), ["  1 skipped on both: torch 2.13 lacks it"], 0),
        (Outcomes({"d": "passed"}, {"c": "no srun"}), ["ran on neither: c: no srun"], 1),
        (Outcomes({"d": "passed"}), ["skipped on the bare machine and unknown here: c"], 1),
        (Outcomes({"c": "failed", "d": "passed"}), ["failed here: c"], 1),
        (
            Outcomes({}, {"c": "no GPU", "d": "no GPU"}),
            ["  2 skipped on both: no GPU", "one of both runs played no test"],
            1,
        ),
    ],
)
def test_what_ci_says(here: Outcomes, lines: list[str], code: int) -> None:
    """A test that ran in neither run is an error, unless for want of a GPU or of a version of torch."""
    said, found = judge(BARE, here)
    assert said[1:3] == ["  1 skipped on the bare machine: no srun", "  1 skipped on the bare machine: no GPU"]
    assert (said[3:], found) == (lines, code)


def test_counts_add_up() -> None:
    """Of all tests: those that ran on the bare machine, and those that ran here."""
    (first, *_), _ = judge(BARE, Outcomes({"c": "passed"}, {"d": "no GPU"}))
    assert first == "2 tests ran on the bare machine and 1 here: 3 of 4"
