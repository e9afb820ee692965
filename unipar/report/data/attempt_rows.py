"""Attempts of a run that went on in its folder, as its page shows them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unipar.results.run_report import Report
from unipar.run_folder.layout import attempts_path
from unipar.run_folder.run_attempts import read_attempts
from unipar.utils.text import count_of


@dataclass(frozen=True)
class ShownAttempt:
    """One attempt of a run."""

    number: int
    strategy: str
    ranks: int
    after: int | None
    """Step after which it went on; None if a later attempt went on from an earlier step."""

    reached: int
    """The last step that it finished."""

    end: str
    """Its end, in words."""

    changes: tuple[str, ...] = ()
    """Lines on how its config differs from that of the attempt before."""

    @property
    def name(self) -> str:
        """Strategy and number of ranks."""
        return f"{self.strategy or 'unknown'}, {count_of(self.ranks, 'rank') if self.ranks else 'ranks unknown'}"


def shown_attempts(
    folder: Path,
    report: Report,
    rows: Iterable[Mapping[str, Any]],
    failure: str,
    problems: list[str],
    launched: Mapping[str, Any],
) -> list[ShownAttempt]:
    """Return all attempts of a run, this one last, with the launch.json `launched`; none if there was only one."""
    try:
        earlier = read_attempts(folder)
    except (OSError, AttributeError, LookupError, TypeError, ValueError) as e:
        problems.append(f"{attempts_path(folder)} cannot be read ({type(e).__name__}): earlier attempts are left out")
        return []
    if not earlier:
        return []
    began = {int(row.get("attempt", 0)): int(row["step"]) for row in rows if row["event"] == "continued"}
    shown = [
        ShownAttempt(
            i,
            a.strategy,
            a.ranks,
            0 if i == 1 else began.get(i),
            a.step,
            _first_line(a.message) or "no error recorded",
            _lines(a.launch),
        )
        for i, a in enumerate(earlier, 1)
    ]
    last = len(earlier) + 1
    end = _first_line(failure) or ("" if report.stopped is None else f"stopped by {report.stopped_by}") or "–"
    return [
        *shown,
        ShownAttempt(last, report.strategy, report.size, began.get(last, 0), report.steps, end, _lines(launched)),
    ]


def _lines(launched: Mapping[str, Any]) -> tuple[str, ...]:
    lines = launched.get("lines")
    return tuple(map(str, lines)) if isinstance(lines, list) else ()


def saved_steps(rows: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the steps of a run's checkpoints, as far as the run log knows."""
    return sorted({int(row["step"]) for row in rows if row["event"] in ("checkpoint", "resumed")})


def _first_line(message: str) -> str:
    first = message.strip().partition("\n")[0]
    return first.partition("; what was logged is in")[0]
