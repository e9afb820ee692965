"""Device lines that tests execute, on the emulated device and without it: `make device-lines`."""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from tests.support.softcuda.coverage.device_lines import ROOT, Position, find_device_lines, position_of, source_files
from tests.support.softcuda.coverage.exceptions import EXCEPTIONS
from tests.support.softcuda.coverage.recorder import RECORDS, read_records
from unipar.utils.table import format_table

FILE = ROOT / "build" / "device-lines.tsv"
SITE = Path(__file__).with_name("site")
HEAD = ("file", "device lines", "without a device", "emulated", "excepted", "not executed", "lines")


@dataclass(frozen=True)
class DeviceLine:
    """A device line, and where it was executed."""

    file: str
    line: int
    without_device: bool
    emulated: bool
    reason: str
    """Why it need not be executed; "" if it is to be."""

    @property
    def missed(self) -> bool:
        """Whether nothing executed it, and no reason is known."""
        return not (self.without_device or self.emulated or self.reason)


def reason_of(file: str, text: str) -> str:
    """Return why a device line need not be executed, or ""."""
    return next((why for beginning, why in EXCEPTIONS.get(file, {}).items() if text.startswith(beginning)), "")


def lines_of(file: Path, executed: set[tuple[str, str, Position]]) -> list[DeviceLine]:
    """Return the device lines of a file; `executed` has machine, file and position."""
    name = str(file)
    places = {(bool(machine), at) for machine, where, at in executed if where == name}
    return [
        DeviceLine(
            name,
            node.lineno,
            without_device=(False, position_of(node)) in places,
            emulated=(True, position_of(node)) in places,
            reason=reason_of(name, ast.unparse(node)),
        )
        for node in find_device_lines(ast.parse((ROOT / file).read_text("utf-8")), name).nodes
    ]


def row_of(name: str, lines: Sequence[DeviceLine]) -> list[str]:
    """Return a row of the table."""
    neither = [line for line in lines if not (line.without_device or line.emulated)]
    missed = dict.fromkeys(str(line.line) for line in neither if line.missed)
    excepted = sum(not line.missed for line in neither)
    here, there = sum(line.without_device for line in lines), sum(line.emulated for line in lines)
    counts = (len(lines), here, there, excepted, len(neither) - excepted)
    return [name, *map(str, counts), ", ".join(missed)]


def run_tests(words: list[str], records: Path) -> int:
    """Run pytest with recording, and return its exit code."""
    path = os.pathsep.join([str(SITE), str(ROOT), str(ROOT / "backends")])
    with tempfile.TemporaryDirectory() as compiled:
        variables = {RECORDS: str(records), "PYTHONPATH": path, "TORCH_EXTENSIONS_DIR": compiled}
        command = [sys.executable, "-m", "pytest", *words]
        return subprocess.run(command, cwd=ROOT, env={**os.environ, **variables}, check=False).returncode


def main() -> int:
    """Run tests, print the table, and return 1 if a line is neither executed nor excepted."""
    parser = argparse.ArgumentParser(description="device lines that tests execute")
    parser.add_argument("words", nargs="*", default=["tests/emulated", "-m", ""], help="words for pytest")
    parser.add_argument("--records", type=Path, default=FILE, help="file of the executed lines")
    parser.add_argument("--more", action="store_true", help="keep what earlier runs have executed")
    parser.add_argument("--table", action="store_true", help="run no tests: print the table of earlier runs")
    asked = parser.parse_args()
    records: Path = asked.records.absolute()
    records.parent.mkdir(parents=True, exist_ok=True)
    if not (asked.more or asked.table):
        records.write_text("", "utf-8")
    failed = 0 if asked.table else run_tests(asked.words, records)
    executed = read_records(records)
    by_file = {str(file): lines for file in source_files() if (lines := lines_of(file, executed))}
    every = list(chain.from_iterable(by_file.values()))
    rows = [row_of(file, lines) for file, lines in by_file.items()]
    print("emulated: no GPU has run any of this")
    print(format_table(HEAD, [*rows, [*row_of("all", every)[:-1], ""]], width=200))
    return failed or int(any(line.missed for line in every))


if __name__ == "__main__":
    raise SystemExit(main())
