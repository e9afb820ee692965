"""Tables of benchmarks/reports/silent-errors.md: what scripts print of living errors, and what `verify` has found.

Run as a module (`python -m tests.corpus.page`), it runs every script, verifies every case and writes both.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from textwrap import fill

from tests.corpus.cases import CASES, MISSED, Case, Missed
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


def shown_thread(thread: str) -> str:
    """Return the short name of a thread."""
    return thread_link(thread).partition("]")[0].removeprefix("[")


def alive_errors() -> list[Case | Missed]:
    """Return the errors that a script shows."""
    return [error for error in (*CASES.values(), *MISSED) if error.script]


def command_of(error: Case | Missed) -> str:
    """Return the line that runs the script of an error, with the library and the thread behind it."""
    return f"$ python tests/corpus/alive/{error.script}.py  # {error.alive}, {shown_thread(error.thread)}"


def printed_by(error: Case | Missed) -> str:
    """Return what the script of an error prints."""
    script = ROOT / f"tests/corpus/alive/{error.script}.py"
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=600, check=True)
    return run.stdout.rstrip()


def row_of(case: Case, verified: Verified) -> str:
    """Return the row of a case that was verified."""
    found = verified.finding
    return _row(case, f"{found.kind or 'no kind'}; {place_of(found)}")


def row_of_missed(error: Missed) -> str:
    """Return the row of an error that is not found."""
    return _row(error, f"not found: {error.why}")


def _row(error: Case | Missed, last: str) -> str:
    alive = f" **Alive in {error.alive}.**" if error.alive else ""
    return f"| {thread_link(error.thread)} | {error.wrong}{alive} | {last} |"


def rows_of_page(text: str) -> dict[str, str]:
    """Return the rows of the page by the link with which they begin."""
    rows = [line for line in text.splitlines() if line.startswith("| [")]
    return {row.split(" | ")[0].removeprefix("| "): row for row in rows}


def order_of_rows() -> list[str]:
    """Return the links of all rows: errors that are alive, then the others."""
    errors: list[Case | Missed] = [*CASES.values(), *MISSED]
    return [thread_link(error.thread) for error in sorted(errors, key=lambda error: not error.alive)]


def counts() -> str:
    """Return the sentence that counts the errors."""
    found, missed, alive = len(CASES), len(MISSED), len(alive_errors())
    return (
        f"Of {found + missed} errors, {found} are found and named with kind and place, and {missed} is not found. "
        f"{alive} can still be seen in the versions that `constraints.txt` pins; their rows come first."
    )


def write_page(verified: Mapping[str, Verified]) -> None:
    """Replace what scripts print, the sentence that counts the errors, and the table."""
    text = PAGE.read_text("utf-8")
    shown = "\n".join(f"{command_of(error)}\n{printed_by(error)}" for error in alive_errors())
    rows = {thread_link(CASES[name].thread): row_of(CASES[name], found) for name, found in verified.items()}
    rows |= {thread_link(error.thread): row_of_missed(error) for error in MISSED}
    table = HEAD + "\n".join(rows[link] for link in order_of_rows())
    text = re.sub(r"\$ python tests/corpus/alive/.*?\n```", lambda _: f"{shown}\n```", text, flags=re.DOTALL)
    text = re.sub(r"Of \d+ errors.*?\n\n", lambda _: f"{fill(counts(), 120)}\n\n", text, flags=re.DOTALL)
    text = re.sub(r"\| thread \|.*?\n\n", lambda _: f"{table}\n\n", text, flags=re.DOTALL)
    PAGE.write_text(text, "utf-8")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, Forks() as forks:
        write_page(verify_cases(forks, Path(folder), CASES))
