"""Silent errors of other libraries on the emulated device: `verify` names them there as on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.corpus.cases import CASES
from tests.support.softcuda.processes import EmulatedDevice

pytestmark = pytest.mark.emulated

ROUNDED = ("more-digits",)
"""Errors that every parameter has, so that rounding decides which of them is the first beyond what is allowed."""

CODE = """
from pathlib import Path
from tests.corpus.verifying import place_of, verify_cases
from tests.support.forks import LENT, Forks
with Forks(LENT) as forks:
    verified = verify_cases(forks, Path({folder!r}), {names!r}, "cuda")
result = {{
    name: [case.verdict.outcome, case.finding.kind, place_of(case.finding)]
    for name, case in verified.items()
}}
"""


@pytest.mark.parametrize("task", sorted({case.task for case in CASES.values()}))
def test_errors_of_others_are_named(task: str, emulated: EmulatedDevice, tmp_path: Path) -> None:
    """Each strategy disagrees, by the same kind of fault in the same place; the same engines without an error agree.

    How many more parameters differ depends on how kernels round.
    """
    cases = {name: case for name, case in CASES.items() if case.task == task}
    run = emulated.run(CODE.format(folder=str(tmp_path), names=list(cases)), timeout=900)
    assert run.code == 0, run.stderr
    found = {name: [outcome, kind, first_place(name, place)] for name, (outcome, kind, place) in run.result.items()}
    assert found == {name: ["disagrees", case.kind, first_place(name, case.place)] for name, case in cases.items()}
    assert run.texts("race") == []


def first_place(name: str, place: str) -> str:
    """Return the step, with the first parameter where it is that of every device."""
    return place.partition(", " if name in ROUNDED else " and ")[0]
