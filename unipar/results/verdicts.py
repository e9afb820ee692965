"""`Verdicts`: results of `verify`, with a verdict for each strategy, and their table."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import Field, SerializerFunctionWrapHandler, field_serializer, model_serializer, model_validator
from typing_extensions import override

from unipar.config import Precision
from unipar.errors import Stopped, Unsupported
from unipar.results.row import library_name_column, outcome_reason
from unipar.results.stored import StoredResult
from unipar.run_folder.layout import PAGE_FILE_NAME
from unipar.utils.columns import NO_TEXT, Column, Reason, choose_columns, table_blocks
from unipar.utils.notebook import ShownAsPage
from unipar.utils.screen import Screen
from unipar.utils.table import wrap_lines
from unipar.utils.text import count_of, first_few

VerdictOutcome = Literal["waits", "agrees", "disagrees", "refused", "absent", "failed"]

ONE_PROCESS_RUN_NAME: Final = "one process"
"""Name of the run with which strategies are compared; files of earlier versions do not name it."""

CUT_ALIKE_RUN_NAME: Final = "a replay, share by share, as configured"
"""Name of the run that takes its place if the numbers depend on how a batch is cut."""

CutKind = Literal["sum", "batch statistics", "samples combined"]

_REPLAY_ORDERS: Final = {"shares": "share by share", "micros": "microbatch by microbatch"}
"""Orders of a replay, in words."""

LONGEST_REASON: Final = 100
"""Characters of the reason why a strategy did not run that the sentence on all strategies shows."""


class Finding(StoredResult):
    """Diagnosis of a strategy that disagrees with one process: the first difference, and the kind of fault."""

    step: int
    what: str
    """Quantity that differs first in that step: samples, sample weight, rate, loss, norm, or a kind of state."""

    kind: str = ""
    """Kind of fault; empty if unknown."""

    candidates: tuple[str, ...] = ()
    """Kinds of fault that fit equally well, if there are several; `kind` lists them all."""

    says: str = ""
    """Evidence for the kind of fault, in a sentence."""

    parameter: str = ""
    """First parameter, in the model's order, that differs in that step."""

    parameters: int = 0
    """Number of parameters that differ."""

    forward: str = ""
    """First module whose output differs, with rank and microbatch; empty if none does."""

    backward: str = ""
    """First module in the backward that is given another gradient, with rank and microbatch; empty if none is."""

    traced: bool = True
    """Whether modules were compared; false for a strategy that differs with dropout only."""


class CutDependence(StoredResult):
    """Dependence of the training on how a batch is cut into microbatches, measured in one process."""

    kind: CutKind
    """sum: the loss of a batch is the sum of its parts' losses; batch statistics: BatchNorm without sync; samples
    combined: any other loss that is not the mean of its parts' losses."""

    off: float
    """Largest difference of a loss between runs of one process that cut batches in different ways."""

    micro: int | None
    """Size of a microbatch, if the config fixes it; None if it follows from the number of ranks."""

    way_out: str
    """Change to the task that removes the dependence, in a sentence."""

    @property
    def consequence(self) -> str:
        """Clause that follows "all strategies agree"."""
        unless = "" if self.micro is None else f" unless batch.micro stays {self.micro}"
        return (
            f"and the training depends on how a batch is cut, so another number of ranks trains another model{unless}"
        )


class Verdict(StoredResult):
    """Verdict on one strategy."""

    strategy: str
    outcome: VerdictOutcome
    note: str = ""
    digits: int | None = None
    """Leading digits of the loss that equal one process's in every step; None: all bits do, or it did not run."""

    bits: str = ""
    """Order in which a one-process replay gives the same bits, `shares` or `micros`; empty if neither does."""

    worst: str = ""
    """Quantity with the largest difference in proportion to the allowed one, in a sentence."""

    share: float | None = None
    """Largest difference, divided by the allowed one."""

    shares: dict[str, float] = Field(default_factory=dict)
    """Largest difference of each quantity, divided by the allowed one; empty in files of earlier versions."""

    undecided: int = 0
    """Tokens whose router is undecided up to rounding, for which the strategy takes the experts of one process."""

    finding: Finding | None = None
    losses: list[float] = Field(default_factory=list)
    norms: list[float] = Field(default_factory=list)
    base: str = ""
    """Run of one process with which the strategy is compared; "" if it is the one of the whole verification."""

    allowed: dict[str, list[float]] = Field(default_factory=dict)
    """Allowed difference of a loss and of a norm, by step; {} if it is that of the whole verification."""

    named: bool = False
    """Whether the strategy was asked for by name, not by a pattern such as `*`."""

    alone: bool = False
    """Whether the strategy is one process and a pattern gave it: verify cannot compare it, and it is not counted."""

    @field_serializer("share")
    def _store_share(self, share: float | None) -> float | None:
        """Return None for an infinite share, because JSON has no infinity."""
        return share if share is not None and math.isfinite(share) else None

    @field_serializer("shares")
    def _store_shares(self, shares: dict[str, float]) -> dict[str, float | None]:
        return {what: self._store_share(share) for what, share in shares.items()}

    @property
    def reservation(self) -> str:
        """Clause that follows "agrees" if a router was undecided; "" if none was."""
        tokens = count_of(self.undecided, "token")
        return f"but for {tokens} whose router is undecided" if self.undecided else ""

    @property
    def short_reason(self) -> str:
        """Beginning of the reason why the strategy did not run, for a sentence on several strategies."""
        return textwrap.shorten(re.split(r"; |\n", self.note, maxsplit=1)[0], LONGEST_REASON, placeholder=" ...")


class Verdicts(StoredResult, ShownAsPage):
    """Verdicts on all strategies, and the runs of one process with which they were compared."""

    name: str
    out: str
    precision: Precision
    ranks: int
    steps: int
    rows: list[Verdict]
    machines: int = 1
    """Machines on which the ranks of every strategy are."""

    one: dict[str, dict[str, list[float]]] = Field(default_factory=dict)
    """Losses and norms of one process, by run."""

    base: str = ""
    """Run of one process with which the strategies are compared; "" in files of earlier versions."""

    allowed: dict[str, list[float]] = Field(default_factory=dict)
    """Allowed difference of a loss and of a norm, by step."""

    remarks: list[str] = Field(default_factory=list)
    """Remarks on the task itself."""

    cut_dependence: CutDependence | None = None
    """Dependence of the training on how a batch is cut; None if there is none, or if it was not examined."""

    numbers: dict[str, str] = Field(default_factory=dict)
    """Settings that decide the last digits on a device, as every run has them; {} on the CPU."""

    unrepeatable: tuple[str, ...] = ()
    """Operations of the task that have no deterministic kernel on the device."""

    fp64_error: str = ""
    """Error of the run in fp64, if the model cannot run in fp64."""

    strict: bool = False
    """Whether a training that depends on how a batch is cut counts as a failure."""

    stopped: str = ""
    """Reason why there is no verdict on any strategy."""

    interrupted: bool = False
    versions: dict[str, str] = Field(default_factory=dict)
    machine: dict[str, Any] = Field(default_factory=dict)

    note: str = Field(default="", exclude=True)
    """Last line of the table: the path of the page, or why there is none; not stored."""

    library_names: Mapping[str, str] = Field(default={}, exclude=True)
    """The libraries' own names of strategies; not stored."""

    @model_validator(mode="before")
    @classmethod
    def _read_rows(cls, data: dict[str, Any]) -> dict[str, Any]:
        """Return the values of a file with the shares that are infinite; raise LookupError without rows."""
        return data if "rows" in data else {**data, "rows": [_restore_infinities(row) for row in data["strategies"]]}

    @model_serializer(mode="wrap")
    def _store(self, figures: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Return what verify.json holds: every figure, and for its readers the summary and the exit code."""
        data = figures(self)
        rows, cut = data.pop("rows"), data.pop("cut_dependence")
        return {**data, "cut_dependence": cut, "summary": self.summary, "code": self.code, "strategies": rows}

    def base_of(self, row: Verdict) -> dict[str, list[float]]:
        """Return losses and norms of the run with which a strategy is compared; {} if it is not known."""
        return self.one.get(row.base, {}) if row.base else self.base_run

    def allowed_for(self, row: Verdict) -> dict[str, list[float]]:
        """Return the allowed difference of a strategy's loss and norm, by step."""
        return row.allowed or self.allowed

    @property
    def base_run(self) -> dict[str, list[float]]:
        """Losses and norms of the run with which the strategies are compared; {} if it is not known."""
        names = [self.base] if self.base else [CUT_ALIKE_RUN_NAME, ONE_PROCESS_RUN_NAME]
        return next((self.one[name] for name in names if name in self.one), {})

    @property
    def code(self) -> int:
        """Exit code of the command line."""
        if self.interrupted:
            return Stopped.code
        outcomes = {row.outcome for row in self.rows}
        if self.stopped or (self.strict and self.cut_dependence is not None):
            return 1
        if "agrees" not in outcomes or {"disagrees", "failed"} & outcomes:
            return 1
        return Unsupported.code if any(row.named for row in self._without_verdict) else 0

    @property
    def _without_verdict(self) -> list[Verdict]:
        """Strategies that cannot run here."""
        return [row for row in self.rows if row.outcome in ("refused", "absent") and not row.alone]

    @property
    def summary(self) -> str:
        """Verdict on all strategies in one sentence: the first line below the table."""
        ran = [row for row in self.rows if row.outcome in ("agrees", "disagrees")]
        differing = [row for row in ran if row.outcome == "disagrees"]
        if self.stopped:
            return f"no verdict: {self.stopped}"
        if self.interrupted:
            return "interrupted: strategies without a verdict did not finish"
        failures = sum(row.outcome == "failed" for row in self.rows)
        failed = f"; {failures} failed" if failures else ""
        missing = self._missing()
        if not ran:
            return f"no verdict: no strategy ran{failed}{missing}"
        if differing:
            several = f"{len(differing)} of {len(ran)} strategies disagree{'s' * (len(differing) == 1)}"
            each = several if len(ran) > 1 else f"{ran[0].strategy} disagrees"
        elif missing:
            each = f"{len(ran)} of {len(ran) + failures + len(self._without_verdict)} strategies"
            each += " agrees" if len(ran) == 1 else " agree"
        else:
            each = f"all {len(ran)} strategies agree" if len(ran) > 1 else f"{ran[0].strategy} agrees"
        line = f"{each} with one process over {count_of(self.steps, 'step')} on {count_of(self.ranks, 'rank')}"
        line += f" of {count_of(self.machines, 'machine')}" if self.machines > 1 else ""
        cut = "" if self.cut_dependence is None else f", {self.cut_dependence.consequence}"
        undecided = max(ran, key=lambda row: row.undecided).reservation
        undecided = f", {undecided}" if undecided else ""
        return f"{line}{undecided}{cut}{failed}{missing}"

    def _missing(self) -> str:
        """Return how many strategies cannot run here, and why, as the end of a sentence; "" if all ran."""
        refused = [row for row in self._without_verdict if row.outcome == "refused"]
        absent = [row.strategy for row in self._without_verdict if row.outcome == "absent"]
        by_reason: dict[str, list[str]] = {}
        for row in refused:
            by_reason.setdefault(row.short_reason, []).append(row.strategy)
        reasons = first_few([f"{first_few(strategies)} ({reason})" for reason, strategies in by_reason.items()])
        line = f"; {len(refused)} cannot run this model: {reasons}" if refused else ""
        return line + (f"; {len(absent)} not installed: {first_few(absent)}" if absent else "")

    @override
    def __str__(self) -> str:
        return self.screen()

    @property
    @override
    def page(self) -> Path:
        return Path(self.out) / PAGE_FILE_NAME

    def columns(self) -> list[Column[Verdict]]:
        """Return the columns of every table."""
        return [
            Column("strategy", lambda row: row.strategy, right=False),
            library_name_column(self.library_names, dropped=1).of(lambda row: row.strategy),
            Column("loss", _digits_text, key="agreement", right=False),
            Column("of allowed", lambda row: row.share, format_share, key="share"),
            Column("verdict", _verdict_text, right=False),
            Column("verdict", _exact_verdict_text, key="exact_verdict", right=False),
            Column("bit for bit", lambda row: _REPLAY_ORDERS.get(row.bits), key="bits", right=False),
        ]

    def screen(self, width: int = 80, next_steps: Sequence[str] = ()) -> str:
        """Return the verdict, the table and the next steps, in one screen."""
        faults = [line for row in self.rows if row.outcome == "disagrees" for line in describe_verdict(row)]
        return Screen(
            answer=self.summary,
            warnings=[*self.cut_lines(), *faults],
            columns=choose_columns(
                self.columns(), "strategy", "known_as", "agreement", "share", "verdict", agreement="agreement"
            ),
            rows=self.rows,
            reason=_reason,
            next_steps=next_steps,
            last=[self.note],
        ).format(width)

    @override
    def table(self, width: int = 80) -> str:
        """Return the verdict, the table as text, and all remarks: what `--details` prints."""
        answers = self.answer_lines()
        parts = [
            wrap_lines(answers, width),
            [line for block in self.blocks(width) for line in block],
            wrap_lines(self.remark_lines()[len(answers) :], width),
        ]
        return "\n\n".join("\n".join(lines) for lines in parts if lines)

    def blocks(self, width: int) -> list[list[str]]:
        """Return the lines of the header, then of each row."""
        columns = choose_columns(self.columns(), "strategy", "agreement", "share", "exact_verdict")
        return table_blocks(columns, self.rows, width=width, reason=_reason)

    def answer_lines(self) -> list[str]:
        """Return the verdict in sentences: on all strategies, then on each that disagrees or has a note."""
        if self.stopped:
            return [self.summary]
        faults = [line for row in self.rows for line in describe_verdict(row)]
        return [self.summary, *self.cut_lines(), *self.bitwise_lines(), *faults]

    def number_lines(self) -> list[str]:
        """Return a line on what was set on the device; none on the CPU."""
        listed = "; ".join(f"{name}: {value}" for name, value in self.numbers.items())
        return [f"set in every run: {listed}"] if listed else []

    def remark_lines(self) -> list[str]:
        """Return the verdict, then remarks on the task, and what the columns are."""
        notes = [] if self.stopped else self.column_notes()
        return [*self.answer_lines(), *self.remarks, *self.number_lines(), *notes, *filter(None, [self.note])]

    def column_notes(self) -> list[str]:
        """Return what the columns of the table mean."""
        return [
            "loss: leading digits that equal those of one process, the fewest over all steps",
            "of allowed: the largest difference of loss, norm, rates, samples and every tensor of the state, divided "
            f"by 4 times the difference between runs of one process that add in other orders ({self.precision})",
        ]

    def cut_lines(self) -> list[str]:
        """Return the way out of a training that depends on how a batch is cut, and what --strict makes of it."""
        if self.cut_dependence is None:
            return []
        lines = [f"  way out: {self.cut_dependence.way_out}"]
        return [*lines, "  with --strict, this alone makes the exit code 1"] if self.strict else lines

    def bitwise_lines(self) -> list[str]:
        """Return a line on the strategies that equal a replay bit for bit, if all that ran agree and any does."""
        ran = [row for row in self.rows if row.outcome in ("agrees", "disagrees")]
        exact = sum(bool(row.bits) for row in ran)
        if self.interrupted or not exact or any(row.outcome == "disagrees" for row in ran):
            return []
        how = "all of them" if exact == len(ran) else f"{exact} of them"
        return [f"{how} bit for bit with a replay in one process (optimizer by for-loop, norm in fp64)"]


def _restore_infinities(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row of a file with the shares that are infinite."""
    endless = row.get("share") is None and row["outcome"] == "disagrees"
    shares = {what: math.inf if share is None else share for what, share in row.get("shares", {}).items()}
    return row | {"share": math.inf if endless else row.get("share"), "shares": shares}


def _reason(row: Verdict) -> Reason | None:
    """Return why there is no verdict on a strategy, or None if there is one."""
    return None if row.outcome in ("agrees", "disagrees") else outcome_reason(row.outcome, row.note)


def _digits_text(row: Verdict) -> str:
    return "same bits" if row.digits is None else count_of(row.digits, "digit")


def _verdict_text(row: Verdict) -> str:
    if row.outcome == "agrees":
        return f"agrees, {row.reservation}" if row.undecided else "agrees bit for bit" if row.bits else "agrees"
    kind = row.finding.kind if row.finding is not None and row.finding.kind else "unknown kind of fault"
    return f"DISAGREES: {kind}"


def _exact_verdict_text(row: Verdict) -> str:
    exact = row.outcome == "agrees" and row.bits and not row.undecided
    return "agrees; bit-for-bit equal to the replay" if exact else _verdict_text(row)


def format_share(share: float | None) -> str:
    """Return a difference as a multiple of the allowed one; an infinite one is `beyond`."""
    if share is None:
        return NO_TEXT
    if share >= 100 or math.isnan(share):
        return "beyond" if not math.isfinite(share) else f"{share:.1e}"
    return f"{share:.2f}"


def describe_verdict(row: Verdict) -> list[str]:
    """Return sentences on a strategy that disagrees or has a note."""
    if row.outcome == "agrees" and row.note:
        return [f"{row.strategy}: {row.note}"]
    if row.outcome != "disagrees":
        return []
    finding = row.finding
    lines = [f"{row.strategy} DISAGREES: {row.worst}"]
    if finding is None:
        return lines
    lines.append(f"  kind: {finding.kind or 'unknown'}{': ' if finding.says else ''}{finding.says}")
    lines.append(f"  first step: {finding.step}; first difference in it: {finding.what}")
    if finding.forward or finding.backward:
        lines += [
            f"  first module {w}: {m}" for w, m in (("forward", finding.forward), ("backward", finding.backward)) if m
        ]
    elif finding.traced:
        lines.append("  first module: none; forward and backward equal those of one process, the fault is after them")
    if finding.parameter:
        more = f", and {finding.parameters - 1} more" if finding.parameters > 1 else ""
        lines.append(f"  first parameter: {finding.parameter}{more}")
    return lines
