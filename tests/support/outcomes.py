"""What became of each test of a run, in a file that a later run on another machine reads.

`pytest --outcomes FILE` writes it; `pytest --not-run-in FILE` plays only those tests that did not run in that one.
`python -m tests.support.outcomes BARE HERE` judges two such runs: where a test ran in neither, for another reason than
a GPU or a version of torch, it says so and exits 1.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

ALLOWED = ("no GPU", "torch ")
"""How the reason of a skip begins that no machine without a GPU, or with another torch, can do anything about."""


@dataclass
class Outcomes:
    """Outcomes of the tests of one run."""

    ran: dict[str, str] = field(default_factory=dict[str, str])
    """`passed` or `failed` by test; an expected failure is passed."""

    skipped: dict[str, str] = field(default_factory=dict[str, str])
    """Reasons by test."""

    @classmethod
    def read(cls, file: Path) -> Outcomes:
        return cls(**json.loads(file.read_text("utf-8")))

    def knows(self, test: str) -> bool:
        """Return whether a test was among those of this run."""
        return test in self.ran or test in self.skipped

    def write(self, file: Path) -> None:
        file.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")


class Recorder:
    """Plugin that records outcomes, and writes them when the run has ended."""

    def __init__(self, file: Path) -> None:
        self.file = file.absolute()
        self.outcomes = Outcomes()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        expected = hasattr(report, "wasxfail")
        if report.failed:
            self.outcomes.ran[report.nodeid] = "failed"
        elif report.skipped and not expected:
            self.outcomes.skipped[report.nodeid] = reason_of_skip(report.longrepr)
        elif report.when == "call" or expected:
            self.outcomes.ran[report.nodeid] = "passed"

    def pytest_sessionfinish(self) -> None:
        self.outcomes.write(self.file)


def reason_of_skip(longrepr: object) -> str:
    """Return why a test was skipped; pytest has a file, a line and `Skipped: REASON`."""
    text = str(longrepr[2]) if isinstance(longrepr, tuple) else str(longrepr)
    return text.removeprefix("Skipped: ")


def judge(bare: Outcomes, here: Outcomes) -> tuple[list[str], int]:
    """Return what is to be said of a run on a bare machine and of the rest of the tests here, and the exit code."""
    excused = {test: why for test, why in here.skipped.items() if why.startswith(ALLOWED)}
    ran = len(bare.ran) + len(here.ran)
    lines = [
        f"{len(bare.ran):,} tests ran on the bare machine and {len(here.ran):,} here: "
        f"{ran:,} of {ran + len(here.skipped):,}"
    ]
    lines += [f"  {n:,} skipped on the bare machine: {why}" for why, n in Counter(bare.skipped.values()).most_common()]
    lines += [f"  {n:,} skipped on both: {why}" for why, n in Counter(excused.values()).most_common()]
    wrong = [f"ran on neither: {test}: {why}" for test, why in here.skipped.items() if test not in excused]
    wrong += [f"skipped on the bare machine and unknown here: {test}" for test in bare.skipped if not here.knows(test)]
    wrong += [f"failed on the bare machine: {test}" for test, outcome in bare.ran.items() if outcome == "failed"]
    wrong += [f"failed here: {test}" for test, outcome in here.ran.items() if outcome == "failed"]
    if not (bare.ran and here.ran):
        wrong.append("one of both runs played no test")
    return lines + wrong, int(bool(wrong))


def main(words: Sequence[str]) -> int:
    bare, here = (Outcomes.read(Path(word)) for word in words)
    lines, code = judge(bare, here)
    print("\n".join(lines))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
