"""`StrategyResult`: results of one strategy of a comparison, to and from JSON."""

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

StrategyOutcome = Literal["waits", "ran", "refused", "absent", "failed", "unlike"]
"""Outcome of a strategy; absent: its library is not installed; unlike: it trained something else than others."""


REUSED = "reused from an earlier run, and not timed in turns with the strategies that ran later"
"""Note of a row that was reused."""

OLDER_REUSED = "kept from an earlier go, and not timed in turns with the strategies that ran later"
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
class StrategyResult:
    """Results of one strategy."""

    strategy: str
    outcome: StrategyOutcome
    note: str = ""
    """Reason why the strategy did not run, or remark on how it ran."""

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
    """Work in the steps of each rank; empty in files of earlier versions, and until the strategy has ended."""

    marks: TrainingMarks | None = None
    """Marks of what the strategy trained: only strategies with the same training are ranked."""

    started: float = 0.0
    """Seconds from the start of the first process until all ranks were ready."""

    at: str = ""
    """Phase in which the strategy failed, by the failing rank's last heartbeat: "in the backward of step 7"."""

    reused: bool = False
    """Whether the row is from an earlier run of the same comparison, and was not timed in turns with the others."""

    @property
    def name_until_failure(self) -> str:
        """Name of the strategy in memory tables; figures of a failed one are from the time before it failed."""
        return f"{self.strategy}, until it failed" if self.outcome == "failed" else self.strategy

    @property
    def timed_seconds(self) -> list[float]:
        """Seconds of all timed steps."""
        return list(chain.from_iterable(self.seconds))


def row_reason(row: StrategyResult) -> Reason | None:
    """Return why a row has no figures to show, or None if it has some."""
    if row.outcome == "ran" or (row.outcome == "waits" and row.timed_seconds):
        return None
    return outcome_reason(row.outcome, row.note)


def outcome_reason(outcome: str, note: str) -> Reason:
    """Return the reason why a row has no figures, from its outcome and note."""
    return Reason(kind=OUTCOME_NAMES[outcome], text=OUTCOME_PREFIXES[outcome] + (note or "waits"))


def strategy_result_to_json(row: StrategyResult) -> dict[str, Any]:
    """Return a row as a mapping for JSON."""
    memory = [account.model_dump(mode="json") for account in row.memory]
    marks = None if row.marks is None else row.marks.model_dump(mode="json")
    work = [one.model_dump(mode="json") for one in row.work]
    return asdict(replace(row, memory=[], marks=None, work=[])) | {"memory": memory, "marks": marks, "work": work}


def strategy_result_from_json(data: Mapping[str, Any]) -> StrategyResult:
    """Return the row of a mapping from JSON; raise TypeError if its memory has no phases."""
    known = {f.name: data[f.name] for f in fields(StrategyResult) if f.name in data and f.name not in _OWN_CLASSES}
    memory = [MemoryAccount.model_validate(account, strict=False) for account in data.get("memory", [])]
    if not all(account.phases for account in memory):
        raise TypeError(f"{known['strategy']} has an account without phases")
    marks = data.get("marks")
    known.setdefault("reused", OLDER_REUSED in known.get("note", ""))
    return StrategyResult(
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


class RowOfStrategy(Protocol):
    """Row of a table with the strategy that it is about."""

    @property
    def strategy(self) -> str: ...


RowOfStrategyT = TypeVar("RowOfStrategyT", bound=RowOfStrategy)


def library_name_column(names: Mapping[str, str], row: type[RowOfStrategyT], *, dropped: int) -> Column[RowOfStrategyT]:
    """Return the column with what each strategy's library calls it, for rows of this type."""
    return Column(
        head="known as", text=lambda row: names.get(row.strategy, ""), right=False, shortened=True, dropped=dropped
    )
