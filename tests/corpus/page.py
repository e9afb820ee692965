"""Table of benchmarks/reports/silent-errors.md: a row for each case, made of what `verify` has found.

Run as a module (`python -m tests.corpus.page`), it verifies every case and writes the table.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from textwrap import fill

from tests.corpus.cases import CASES, Case
from tests.corpus.verifying import Verified, place_of, verify_cases
from tests.support.forks import ROOT, Forks

PAGE = ROOT / "benchmarks/reports/silent-errors.md"

HEAD = "| thread | what was wrong | what `verify` names |\n|---|---|---|\n"


def thread_link(thread: str) -> str:
    """Return a link to an issue (`owner/repository#number`) or a pull request (`owner/repository!number`)."""
    repository, mark, number = re.split(r"([#!])", thread)
    name = repository.partition("/")[2]
    kind, shown = ("issues", f"{name}#{number}") if mark == "#" else ("pull", f"{name} PR {number}")
    return f"[{shown}](https://github.com/{repository}/{kind}/{number})"


def row_of(case: Case, verified: Verified) -> str:
    """Return the row of a case that was verified."""
    alive = f" **Alive in {case.alive}.**" if case.alive else ""
    found = verified.finding
    return f"| {thread_link(case.thread)} | {case.wrong}{alive} | {found.kind or 'no kind'}; {place_of(found)} |"


def rows_of_page(text: str) -> dict[str, str]:
    """Return the rows of the page by the link with which they begin."""
    rows = [line for line in text.splitlines() if line.startswith("| [")]
    return {row.split(" | ")[0].removeprefix("| "): row for row in rows}


def counts() -> str:
    """Return the sentence that counts the cases."""
    alive, all_of_them = sum(bool(case.alive) for case in CASES.values()), len(CASES)
    return (
        f"All {all_of_them} errors are found and named with kind and place. {alive} can still be seen in the "
        "versions that `constraints.txt` pins."
    )


def write_page(verified: Mapping[str, Verified]) -> None:
    """Replace the sentence that counts the cases, and the table."""
    text = PAGE.read_text("utf-8")
    table = HEAD + "\n".join(row_of(CASES[name], found) for name, found in verified.items())
    text = re.sub(r"All \d+ errors .*?\n\n", lambda _: f"{fill(counts(), 120)}\n\n", text, flags=re.DOTALL)
    text = re.sub(r"\| thread \|.*?\n\n", lambda _: f"{table}\n\n", text, flags=re.DOTALL)
    PAGE.write_text(text, "utf-8")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, Forks() as forks:
        write_page(verify_cases(forks, Path(folder), CASES))
