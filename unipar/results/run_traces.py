"""Traces of a run (`log.trace`): what they cost, and their largest entries, as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

from unipar.errors import ReportError
from unipar.run_folder.run_log import RunLog
from unipar.utils.table import format_table
from unipar.utils.text import format_duration

HOW_TO_OPEN: Final = "open the file at ui.perfetto.dev, which keeps it in the browser"

ENTRY_HEADS: Final = ("entry", "calls", "own time", "of all listed")
_LONGEST_NAME: Final = 50
"""Characters of an entry's name in a table."""


class Entry(NamedTuple):
    """Entry of a trace: all events of one name."""

    name: str
    calls: int
    seconds: float


class RunTrace(NamedTuple):
    """Trace of one rank."""

    rank: int
    first: int
    last: int
    file: Path
    seconds: float
    """Seconds of a traced step: the mean."""

    others: float | None
    """Seconds of other steps: the median of the logged ones; None if none was timed."""

    counted_on: str
    """Place where the time of entries was counted: `device` or `CPU`."""

    entries: tuple[Entry, ...]

    @property
    def title(self) -> str:
        """Steps, and the rank."""
        steps = f"step {self.first}" if self.first == self.last else f"steps {self.first} to {self.last}"
        return f"{steps} of rank {self.rank}"

    @property
    def cost(self) -> str:
        """Sentence on what tracing cost."""
        took = f"a traced step took {format_duration(self.seconds)}"
        if self.others is None:
            return f"{took}; no other step was timed"
        return f"{took}, another one {format_duration(self.others)} (median): {self.seconds / self.others:.2f} times"

    @property
    def rows(self) -> list[list[str]]:
        """Rows of the table of entries, below ENTRY_HEADS."""
        total = sum(entry.seconds for entry in self.entries) or 1.0
        return [
            [_shorten(e.name), f"{e.calls:,}", format_duration(e.seconds), f"{e.seconds / total:.0%}"]
            for e in self.entries
        ]

    def as_data(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return self._asdict() | {"file": str(self.file), "entries": [entry._asdict() for entry in self.entries]}

    def table(self, width: int = 80) -> str:
        """Return the trace as text."""
        heads = (f"largest entries, {self.counted_on}", *ENTRY_HEADS[1:])
        return "\n".join([self.title, self.cost, "", format_table(heads, self.rows, right=(1, 2, 3), width=width)])


def _shorten(name: str) -> str:
    """Return the name of an entry as a table shows it: torch names compiled graphs by long hashes."""
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 3]}..."


def trace_of(rank: int, events: Sequence[Mapping[str, Any]], folder: Path) -> RunTrace | None:
    """Return the trace of a rank by its events, the last one if an earlier attempt wrote another; None without one."""
    traced = [event for event in events if event["event"] == "trace"]
    if not traced:
        return None
    event = traced[-1]
    return RunTrace(
        rank,
        int(event["first"]),
        int(event["step"]),
        folder / str(event["file"]),
        float(event["seconds"]),
        _median_of_others(events, traced),
        str(event["counted_on"]),
        tuple(Entry(str(e["name"]), int(e["calls"]), float(e["seconds"])) for e in event["entries"]),
    )


def _median_of_others(events: Sequence[Mapping[str, Any]], traces: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the median of a step's seconds in logged rows without a traced step, and without the first step.

    In a comparison it is that of the timed steps; without such rows, what was measured before the trace.
    """
    if (turns := next((e["seconds"] for e in events if e["event"] == "untraced"), None)) is not None:
        return float(turns)
    traced = {step for trace in traces for step in range(int(trace["first"]), int(trace["step"]) + 1)}
    seconds, since = list[float](), 0
    for event in events:
        if event["event"] == "step":
            number = int(event["step"])
            if number > 1 and event.get("seconds") and traced.isdisjoint(range(since + 1, number + 1)):
                seconds.append(float(event["seconds"]))
            since = number
    return median(seconds) if seconds else traces[-1].get("before")


def list_traces(by_rank: Mapping[int, Sequence[Mapping[str, Any]]], folder: Path) -> list[RunTrace]:
    """Return the traces of a run by the events of its ranks."""
    found = [trace_of(rank, events, folder) for rank, events in by_rank.items()]
    return [trace for trace in found if trace is not None]


def read_traces(run: Path) -> list[RunTrace]:
    """Return the traces of the ranks of a run; raise ReportError if there is none."""
    logs = sorted(run.glob("rank-*.jsonl"), key=lambda path: int(path.stem.removeprefix("rank-")))
    by_rank = {int(log.stem.removeprefix("rank-")): list(RunLog.read(log)) for log in logs}
    if traces := list_traces(by_rank, run):
        return traces
    if said := [str(e["said"]) for events in by_rank.values() for e in events if e["event"] == "no trace"]:
        raise ReportError(f"{run} has no trace: {said[0]}")
    if not by_rank:
        inner = sorted({str(path.parent) for path in run.glob("**/trace") if path.is_dir()})
        below = f"; name one of the folders in it: {', '.join(inner)}" if inner else "; give a run folder"
        raise ReportError(f"{run} holds no run (rank-0.jsonl){below}")
    raise ReportError(
        f"{run} has no trace, which a run writes with log.trace, such as --set 'log.trace={{steps: [10, 12]}}'"
    )
