"""`StrategyResult`: results of one strategy of a comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from statistics import median, quantiles
from typing import Any, Final, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from unipar.memory.account import MemoryAccount
from unipar.profiling.work import RankWork
from unipar.results.same_training import TrainingMarks
from unipar.results.stored import StoredResult
from unipar.utils.columns import Column, Reason

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


class StrategyResult(StoredResult):
    """Results of one strategy."""

    strategy: str
    outcome: StrategyOutcome
    note: str = ""
    """Reason why the strategy did not run, or remark on how it ran."""

    losses: list[float] = Field(default_factory=list)
    """Losses of the global batch, step by step, with the warm-up."""

    parts: dict[str, list[float]] = Field(default_factory=dict)
    """Losses of each part's own steps, if there are several parts; `losses` are the sums of the last ones."""

    seconds: list[list[float]] = Field(default_factory=list)
    """Seconds of each step on the slowest rank, by timed round."""

    peak_rss: list[int] = Field(default_factory=list)
    """Peak of resident memory by rank, in bytes."""

    memory: list[MemoryAccount] = Field(default_factory=list)
    """Memory account of each rank."""

    work: list[RankWork] = Field(default_factory=list)
    """Work in the steps of each rank; empty in files of earlier versions, and until the strategy has ended."""

    marks: TrainingMarks | None = None
    """Marks of what the strategy trained: only strategies with the same training are ranked."""

    started: float = 0.0
    """Seconds from the start of the first process until all ranks were ready."""

    at: str = ""
    """Phase in which the strategy failed, by the failing rank's last heartbeat: "in the backward of step 7"."""

    reused: bool = False
    """Whether the row is from an earlier run of the same comparison, and was not timed in turns with the others."""

    @model_validator(mode="before")
    @classmethod
    def _read_older(cls, data: dict[str, Any]) -> dict[str, Any]:
        """Return the values with `reused`, which the note of an older file says."""
        return {"reused": OLDER_REUSED in data.get("note", ""), **data}

    @field_validator("memory", mode="before")
    @classmethod
    def _check_phases(cls, memory: Sequence[Any], row: ValidationInfo) -> Sequence[Any]:
        """Return the accounts; raise ValueError if a file has one without phases."""
        if any(isinstance(account, dict) and account.get("phases") in (None, []) for account in memory):
            raise ValueError(f"{row.data['strategy']} has an account without phases")
        return memory

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
    return Reason(kind=OUTCOME_NAMES.get(outcome, outcome), text=OUTCOME_PREFIXES.get(outcome, "") + (note or outcome))


def format_spread(seconds: list[float]) -> str:
    """Return the median and the middle half, in milliseconds: `212 [205..230]`."""
    low, _, high = quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else seconds * 3
    middle = median(seconds)
    places = 0 if middle >= 0.01 else 1 if middle >= 0.001 else 2
    return "{:.{p}f} [{:.{p}f}..{:.{p}f}]".format(middle * 1e3, low * 1e3, high * 1e3, p=places)


def format_median(seconds: list[float]) -> str:
    """Return the median alone, in milliseconds: `212`."""
    return format_spread(seconds).partition(" ")[0]


def format_units_a_second(rate: float) -> str:
    """Return samples or tokens a second, with a decimal below 100."""
    return f"{rate:.{1 if rate < 100 else 0}f}"


def library_name_column(names: Mapping[str, str], *, dropped: int) -> Column[str]:
    """Return the column with what each strategy's library calls it, for names of strategies."""
    known = Column[str]("known as", lambda name: names.get(name) or None, key="known_as", right=False)
    return replace(known, shortened=True, dropped=dropped, optional=True)
