"""Results of `make gpu`: one JSON file, written after every row, and one table."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from benchmarks.gpu.rows import Row

Result = Literal["passed", "failed", "no GPU", "too late", "stopped"]
"""`too late`: its time limit was reached; `stopped`: by Ctrl-C or the end of the call's time, to be continued."""


@dataclass(frozen=True, kw_only=True)
class RowResult:
    """Result of one row."""

    row: str
    ranks: int
    result: Result
    figure: str
    seconds: float


@dataclass
class GpuResults:
    """Results so far, with the machine on which they were measured."""

    machine: dict[str, Any]
    rows: list[RowResult] = field(default_factory=list[RowResult])

    @classmethod
    def read(cls, file: Path, machine: dict[str, Any]) -> GpuResults:
        """Return the finished rows of an earlier call on the same machine; none if there is no such file."""
        try:
            data = json.loads(file.read_text("utf-8"))
        except FileNotFoundError:
            return cls(machine)
        if data["machine"] != machine:
            return cls(machine)
        rows = [RowResult(**row) for row in data["rows"]]
        return cls(machine, [row for row in rows if row.result in ("passed", "failed", "too late")])

    def add(self, row: RowResult, file: Path) -> None:
        """Add a row and write the file."""
        self.rows = [other for other in self.rows if other.row != row.row] + [row]
        self.write(file)

    def write(self, file: Path) -> None:
        """Write the file as a whole, or leave the old one."""
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_suffix(".part")
        data = {"machine": self.machine, "rows": [asdict(row) for row in self.rows]}
        temporary.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
        temporary.replace(file)

    def missing(self, wanted: Iterable[Row]) -> list[Row]:
        """Return the rows that have no result yet."""
        known = {row.row for row in self.rows}
        return [row for row in wanted if row.name not in known]

    def code(self, wanted: Sequence[Row]) -> int:
        """Return the exit code: 0 if every row passed or there is no GPU for it."""
        good = {row.row for row in self.rows if row.result in ("passed", "no GPU")}
        return 0 if all(row.name in good for row in wanted) else 1

    def table(self, wanted: Sequence[Row], width: int) -> str:
        """Return the table of these rows, and a last line that counts the results."""
        from unipar.utils.table import format_table

        known = {row.row: row for row in self.rows}
        shown = [known[row.name] for row in wanted if row.name in known]
        lines = [(r.row, str(r.ranks), f"{r.seconds:.0f}", r.result, r.figure) for r in shown]
        head = ("row", "ranks", "s", "result", "figure")
        counts = Counter(row.result for row in shown)
        if left := len(wanted) - len(shown):
            counts["not run"] = left
        summary = ", ".join(f"{number} {result}" for result, number in counts.items())
        return f"{format_table(head, lines, right=(1, 2), width=width)}\n\n{describe_machine(self.machine)}\n{summary}"


def describe_machine(machine: dict[str, Any]) -> str:
    """Return one line on the machine."""
    gpus = ", ".join(machine["gpus"]) or "no GPU"
    driver = f", driver {machine['driver']}" if machine["driver"] else ""
    versions = ", ".join(f"{name} {machine['versions'][name]}" for name in ("python", "torch") if machine["versions"])
    return f"{gpus}{driver}; {versions}"
