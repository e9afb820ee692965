"""`Examination`: what came of looking at all machines, as checks, JSON and a table."""

from __future__ import annotations

import textwrap
from dataclasses import asdict, dataclass
from typing import Any, Final

from unipar.distributed.machine_checks import MachineCheck, rows_of_checks
from unipar.utils.table import format_table
from unipar.utils.text import count_of

_WIDTH: Final = 80
_MOST_NAMES: Final = 4


@dataclass(frozen=True)
class Examination:
    """Outcome of an examination of all machines."""

    launcher: str
    machines: tuple[str, ...]
    """Name and address of each machine."""

    checks: tuple[MachineCheck, ...]

    @property
    def ok(self) -> bool:
        """Whether no check fails."""
        return all(check.status != "fail" for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {"ok": self.ok, **asdict(self)}

    def table(self) -> str:
        """Return what differs or fails, each with its remedy, and in a few words what does not; 80 columns."""
        rows = rows_of_checks([*self._having("fail"), *self._having("warn")])
        rows.append(("ok", "the rest" if rows else "all", "; ".join(check.finding for check in self._having("ok"))))
        shown, more = ", ".join(self.machines[:_MOST_NAMES]), len(self.machines) - _MOST_NAMES
        head = f"{count_of(len(self.machines), 'machine')}, started by {self.launcher}: {shown}"
        head += f" and {more} more" if more > 0 else ""
        return "\n".join(
            [
                *textwrap.wrap(head, _WIDTH, break_on_hyphens=False),
                format_table(("", "what", "found"), rows, width=_WIDTH),
                self._verdict(),
            ]
        )

    def _having(self, status: str) -> list[MachineCheck]:
        return [check for check in self.checks if check.status == status]

    def _verdict(self) -> str:
        failed, warned = len(self._having("fail")), len(self._having("warn"))
        if not failed and not warned:
            return "ready to run"
        warnings = count_of(warned, "warning")
        if not failed:
            return f"ready to run, with {warnings}"
        return f"not ready to run: {count_of(failed, 'failure')}" + (f", {warnings}" if warned else "")
