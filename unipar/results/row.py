"""`CellResult`: results of one cell of a comparison, to and from JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import chain
from statistics import median, quantiles
from typing import Any, Final, Literal, Protocol, TypeVar

from unipar.memory.account import MemoryAccount
from unipar.profiling.work import RankWork
from unipar.results.same_training import TrainingMarks
from unipar.utils.screen import Column, Reason

CellOutcome = Literal["waits", "ran", "refused", "absent", "failed", "unlike"]
"""Outcome of a cell; absent: its library is not installed here; unlike: it trained something else than the others."""


REUSED = "reused from an earlier run, and not timed in turns with the cells that ran later"
"""Note of a row that was reused."""

OLDER_REUSED = "kept from an earlier go, and not timed in turns with the cells that ran later"
"""Note of a reused row in older files, which have no field `reused`."""


OUTCOME_PREFIXES: Final = {
    "refused": "refused: ",
    "absent": "",
    "failed": "failed: ",
    "unlike": "trained differently: ",
    "waits": "",
}
"""First words of a row without figures, by outcome; the row's note follows."""


OUTCOME_NAMES: Final = {
    "refused": "refused",
    "absent": "not installed",
    "failed": "failed",
    "unlike": "trained differently",
    "waits": "without figures",
}
"""Outcome of a row without figures, as a sentence on several rows has it."""


@dataclass(frozen=True, kw_only=True)
class CellResult:
    """Results of one cell."""

    cell: str
    outcome: CellOutcome
    note: str = ""
    """Reason why the cell did not run, or remark on how it ran."""

    losses: list[float] = field(default_factory=list[float])
    """Losses of the global batch, step by step, with the warm-up."""

    parts: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    """Losses of each part's own steps, if there are several parts; `losses` are the sums of the last ones."""

    seconds: list[list[float]] = field(default_factory=list[list[float]])
    """Seconds of each step on the slowest rank, by timed round."""

    peak_rss: list[int] = field(default_factory=list[int])
    """Peak of resident memory by rank, in bytes."""

    memory: list[MemoryAccount] = field(default_factory=list[MemoryAccount])
    """Memory account of each rank."""

    work: list[RankWork] = field(default_factory=list[RankWork])
    """Work in the steps of each rank; empty in files of earlier versions, and until the cell has ended."""

    marks: TrainingMarks | None = None
    """Marks of what the cell trained: only cells with the same training are ranked."""

    started: float = 0.0
    """Seconds from the start of the first process until all ranks were ready."""

    at: str = ""
    """Phase in which the cell failed, by the failing rank's last heartbeat: "in the backward of step 7"."""

    reused: bool = False
    """Whether the row is from an earlier run of the same comparison, and was not timed in turns with the others."""

    @property
    def name_until_failure(self) -> str:
        """Name of the cell in memory tables; figures of a failed one are from the time before it failed."""
        return f"{self.cell}, until it failed" if self.outcome == "failed" else self.cell

    @property
    def timed_seconds(self) -> list[float]:
        """Seconds of all timed steps."""
        return list(chain.from_iterable(self.seconds))


def row_reason(row: CellResult) -> Reason | None:
    """Return why a row has no figures to show, or None if it has some."""
    if row.outcome == "ran" or (row.outcome == "waits" and row.timed_seconds):
        return None
    return outcome_reason(row.outcome, row.note)


def outcome_reason(outcome: str, note: str) -> Reason:
    """Return the reason why a row has no figures, from its outcome and note."""
    return Reason(kind=OUTCOME_NAMES[outcome], text=OUTCOME_PREFIXES[outcome] + (note or "waits"))


def cell_result_to_json(row: CellResult) -> dict[str, Any]:
    """Return a row as a mapping for JSON."""
    memory = [account.model_dump(mode="json") for account in row.memory]
    marks = None if row.marks is None else row.marks.model_dump(mode="json")
    work = [one.model_dump(mode="json") for one in row.work]
    return asdict(replace(row, memory=[], marks=None, work=[])) | {"memory": memory, "marks": marks, "work": work}


def cell_result_from_json(data: Mapping[str, Any]) -> CellResult:
    """Return the row of a mapping from JSON; raise TypeError if its memory has no phases."""
    known = {f.name: data[f.name] for f in fields(CellResult) if f.name in data and f.name not in _OWN_CLASSES}
    memory = [MemoryAccount.model_validate(account, strict=False) for account in data.get("memory", [])]
    if not all(account.phases for account in memory):
        raise TypeError(f"{known['cell']} has an account without phases")
    marks = data.get("marks")
    known.setdefault("reused", OLDER_REUSED in known.get("note", ""))
    return CellResult(
        **known,
        memory=memory,
        marks=None if marks is None else TrainingMarks.model_validate(marks, strict=False),
        work=[RankWork.model_validate(one, strict=False) for one in data.get("work", [])],
    )


_OWN_CLASSES = ("memory", "marks", "work")
"""Fields that are objects of classes of their own."""


def format_spread(seconds: list[float]) -> str:
    """Return the median and the middle half, in milliseconds: `212 [205..230]`."""
    low, _, high = quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else seconds * 3
    middle = median(seconds)
    places = 0 if middle >= 0.01 else 1 if middle >= 0.001 else 2
    return "{:.{p}f} [{:.{p}f}..{:.{p}f}]".format(middle * 1e3, low * 1e3, high * 1e3, p=places)


class RowOfCell(Protocol):
    """Row of a table with the cell that it is about."""

    @property
    def cell(self) -> str: ...


RowOfCellT = TypeVar("RowOfCellT", bound=RowOfCell)


def library_name_column(names: Mapping[str, str], row: type[RowOfCellT], *, dropped: int) -> Column[RowOfCellT]:
    """Return the column with what each cell's library calls it, for rows of this type."""
    return Column(
        head="known as", text=lambda row: names.get(row.cell, ""), right=False, shortened=True, dropped=dropped
    )
