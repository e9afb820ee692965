"""`Row`: one cell of a comparison, to and from JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import chain
from statistics import median, quantiles
from typing import Any, Literal

from unipar.memory.account import MemoryAccount
from unipar.results.same_training import TrainingMarks

CellOutcome = Literal["waits", "ran", "refused", "absent", "failed", "unlike"]
"""absent: its library is not installed here; unlike: it trained something else than the others."""


REUSED = "kept from an earlier go, and not timed in turns with the cells that ran later"
"""The note of a row that was reused; older files have it and no field `reused`."""


OUTCOME_PREFIXES = {"refused": "refused: ", "absent": "", "failed": "failed: ", "unlike": "not alike: ", "waits": ""}


@dataclass(frozen=True, kw_only=True)
class CellResult:
    """One cell."""

    cell: str
    outcome: CellOutcome
    note: str = ""
    """Why it did not run, or what should be known of how it did."""

    losses: list[float] = field(default_factory=list[float])
    """Of the global batch, step by step, the warm-up too."""

    parts: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    """Of each of several parts, the losses of its own steps; `losses` are the sums of the last ones."""

    seconds: list[list[float]] = field(default_factory=list[list[float]])
    """By timed round, what each step took the slowest rank."""

    peak_rss: list[int] = field(default_factory=list[int])
    """By rank, in bytes."""

    memory: list[MemoryAccount] = field(default_factory=list[MemoryAccount])
    """What each rank allocated, and what for."""

    marks: TrainingMarks | None = None
    """What it was seen to train: only what is alike is ranked."""

    started: float = 0.0
    """Seconds from its first process's start until all ranks were ready."""

    at: str = ""
    """Where it failed, by the failing rank's own last sign: "in the backward of step 7"."""

    reused: bool = False
    """Whether it is from an earlier run of the same comparison, and was not timed in turns with the others."""

    @property
    def timed_seconds(self) -> list[float]:
        return list(chain.from_iterable(self.seconds))


def cell_result_to_json(row: CellResult) -> dict[str, Any]:
    memory = [account.model_dump(mode="json") for account in row.memory]
    marks = None if row.marks is None else row.marks.model_dump(mode="json")
    return asdict(replace(row, memory=[], marks=None)) | {"memory": memory, "marks": marks}


def cell_result_from_json(told: Mapping[str, Any]) -> CellResult:
    known = {f.name: told[f.name] for f in fields(CellResult) if f.name in told and f.name not in ("memory", "marks")}
    memory = [MemoryAccount.model_validate(account, strict=False) for account in told.get("memory", [])]
    if not all(account.phases for account in memory):
        raise TypeError(f"{known['cell']} has an account without phases")
    marks = told.get("marks")
    known.setdefault("reused", REUSED in known.get("note", ""))
    return CellResult(
        **known, memory=memory, marks=None if marks is None else TrainingMarks.model_validate(marks, strict=False)
    )


def format_spread(seconds: list[float]) -> str:
    """`212 [205..230]`: the median and the middle half, in milliseconds."""
    low, _, high = quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else seconds * 3
    middle = median(seconds)
    places = 0 if middle >= 0.01 else 1 if middle >= 0.001 else 2
    return "{:.{p}f} [{:.{p}f}..{:.{p}f}]".format(middle * 1e3, low * 1e3, high * 1e3, p=places)
