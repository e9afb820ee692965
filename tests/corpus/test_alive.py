"""Silent errors that installed libraries have: each script prints what the page has."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest

from tests.corpus.cases import CASES, MISSED, Case, Missed
from tests.corpus.page import PAGE, alive_errors, command_of, printed_by

ALWAYS = ("fsdp2_divides_twice",)
"""Scripts that run whenever tests run; the others are in the sweeps."""


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(error, id=error.script, marks=[] if error.script in ALWAYS else [pytest.mark.sweep])
        for error in alive_errors()
    ],
)
def test_a_script_shows_a_living_error(error: Case | Missed) -> None:
    """The page has its command, and behind that what it prints."""
    assert f"{command_of(error)}\n{printed_by(error)}\n" in PAGE.read_text("utf-8")


def test_each_living_error_has_a_script() -> None:
    """Each is said to be alive in the version that is installed, and no script is without an error."""
    alive = [error for error in (*CASES.values(), *MISSED) if error.alive]
    installed = [f"{name} {version(name).partition('+')[0]}" for name in (error.alive.split()[0] for error in alive)]
    assert [error.alive for error in alive] == installed
    scripts = {path.stem for path in (Path(__file__).parent / "alive").glob("*.py")} - {"__init__"}
    assert {error.script for error in alive} == scripts
