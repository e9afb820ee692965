"""What `verify` found: a row a cell, the verdict on it, and the table that says it."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from typing_extensions import override

from unipar.config import Precision
from unipar.utils.table import format_table_rows
from unipar.utils.text import count_of

VerdictOutcome = Literal["waits", "agrees", "disagrees", "refused", "absent", "failed"]

_VERDICT_PREFIXES = {"refused": "refused: ", "absent": "", "failed": "failed: ", "waits": ""}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Where a cell parts from one process, and what kind of fault fits."""

    step: int
    what: str
    """What parted first in that step: samples, sample weight, rate, loss, norm, or a kind of state."""

    kind: str = ""
    """Empty: no kind that is known fits."""

    candidates: tuple[str, ...] = ()
    """The kinds that fit equally well, where it is not one alone; `kind` lists them all."""

    says: str = ""
    parameter: str = ""
    """The first, in the model's order, of those that part in that step."""

    parameters: int = 0
    """How many do."""

    forward: str = ""
    """The first module whose output parts, and where; empty: none does."""

    backward: str = ""
    """The same for the gradient that came back to it."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One cell."""

    cell: str
    outcome: VerdictOutcome
    note: str = ""
    digits: int | None = None
    """Leading digits of the loss that are one process's, in every step; None: all bits are, or it did not run."""

    bits: str = ""
    """shares or micros: the order in which a one-process replay gives the same bits; empty: neither does."""

    worst: str = ""
    """What comes nearest to what is allowed, or is furthest beyond."""

    share: float | None = None
    """How near, in proportion."""

    finding: Finding | None = None
    losses: list[float] = field(default_factory=list[float])
    norms: list[float] = field(default_factory=list[float])


@dataclass(frozen=True, kw_only=True)
class Verdicts:
    """All cells, and the runs of one process to which they were held."""

    name: str
    out: str
    precision: Precision
    ranks: int
    steps: int
    rows: list[Verdict]
    one: dict[str, dict[str, list[float]]] = field(default_factory=dict[str, dict[str, list[float]]])
    """Losses and norms of one process, by run."""

    allowed: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    """By step, how far a loss and a norm may be off."""

    remarks: list[str] = field(default_factory=list[str])
    """What was found out about the task itself."""

    stopped: str = ""
    """Why there is no verdict on any cell."""

    interrupted: bool = False

    @property
    def code(self) -> int:
        """What the command line exits with."""
        if self.interrupted:
            return 130
        outcomes = [row.outcome for row in self.rows]
        return 0 if "agrees" in outcomes and not {"disagrees", "failed"} & set(outcomes) and not self.stopped else 1

    @override
    def __str__(self) -> str:
        return self.table()

    def table(self, width: int = 80) -> str:
        rows = ["\n".join(lines) for lines in self.blocks(width)]
        said = [line for text in self.remark_lines() for line in textwrap.wrap(text, width, subsequent_indent="  ")]
        return "\n".join([*rows, "", *said])

    def blocks(self, width: int) -> list[list[str]]:
        """The lines of the header, then of each row."""
        return format_table_rows(
            ("cell", "loss", "of allowed", "verdict"), [self._shown(r) for r in self.rows], right=(2,), width=width
        )

    def _shown(self, row: Verdict) -> tuple[str, ...]:
        if row.outcome not in ("agrees", "disagrees"):
            return row.cell, _VERDICT_PREFIXES[row.outcome] + (row.note or "waits")
        digits = "same bits" if row.digits is None else count_of(row.digits, "digit")
        if row.outcome == "agrees":
            verdict = "agrees; the replay's bits" if row.bits else "agrees"
        else:
            kind = row.finding.kind if row.finding is not None and row.finding.kind else "no known kind of fault"
            verdict = f"DISAGREES: {kind}"
        return row.cell, digits, _format_share(row.share), verdict

    def remark_lines(self) -> list[str]:
        """What the table means, and what is wrong."""
        if self.stopped:
            return [f"no verdict: {self.stopped}", *self.remarks]
        lines = [line for row in self.rows for line in _describe_verdict(row)]
        ran = [row for row in self.rows if row.outcome in ("agrees", "disagrees")]
        if self.interrupted:
            lines.append("interrupted: cells without a verdict did not come to their end")
        elif not ran:
            lines.append("no verdict: no cell ran")
        elif all(row.outcome == "agrees" for row in ran):
            lines += self._agreement_lines(ran)
        return [
            *lines,
            *self.remarks,
            "loss: leading digits that are those of one process, the least over all steps",
            "of allowed: the worst of loss, norm, rates, samples and every tensor of the state, in proportion to 4 "
            f"times what one process differs from itself when it adds in another order ({self.precision})",
            f"figures and curves: {self.out}/verify.html",
        ]

    def _agreement_lines(self, ran: Sequence[Verdict]) -> list[str]:
        exact = sum(bool(row.bits) for row in ran)
        each = f"all {len(ran)} cells agree" if len(ran) > 1 else f"{ran[0].cell} agrees"
        lines = [f"{each} with one process over {count_of(self.steps, 'step')} on {count_of(self.ranks, 'rank')}"]
        if exact:
            how = "all of them" if exact == len(ran) else f"{exact} of them"
            lines.append(f"{how} bit for bit with a replay in one process, optimizer by for-loop and norm in fp64")
        return lines

    def to_json(self) -> dict[str, Any]:
        made = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "rows"}
        return {**made, "code": self.code, "cells": [_replace_infinities(asdict(row)) for row in self.rows]}


def _replace_infinities(row: dict[str, Any]) -> dict[str, Any]:
    """JSON knows no infinity."""
    return row | {"share": None if row["share"] is None or not math.isfinite(row["share"]) else row["share"]}


def _format_share(share: float | None) -> str:
    if share is None:
        return "-"
    if share >= 100 or math.isnan(share):
        return "beyond" if not math.isfinite(share) else f"{share:.1e}"
    return f"{share:.2f}"


def _describe_verdict(row: Verdict) -> list[str]:
    """A cell that parts, in sentences."""
    if row.outcome == "agrees" and row.note:
        return [f"{row.cell}: {row.note}"]
    if row.outcome != "disagrees":
        return []
    found = row.finding
    lines = [f"{row.cell} DISAGREES: {row.worst}"]
    if found is None:
        return lines
    lines.append(f"  kind: {found.kind or 'none that is known fits'}{': ' if found.says else ''}{found.says}")
    lines.append(f"  first step: {found.step}, where {found.what} parts first")
    if found.forward or found.backward:
        lines += [
            f"  first module {w}: {m}" for w, m in (("forward", found.forward), ("backward", found.backward)) if m
        ]
    else:
        lines.append("  first module: none, forward and backward are those of one process; it comes after them")
    if found.parameter:
        more = f", and {found.parameters - 1} more" if found.parameters > 1 else ""
        lines.append(f"  first parameter: {found.parameter}{more}")
    return lines
