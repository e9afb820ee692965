"""`TrainingDifference`: what changed from one training to another, where one of them at least was observed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from unipar.memory.account import CATEGORIES, MEMORY_PHASES, PhasePeak
from unipar.results.loss_agreement import measure_agreement
from unipar.results.memory_tables import category_column, format_mib, group_categories
from unipar.results.observation import TrainingFinding, describe_finding
from unipar.results.observation_table import STEP_PARTS
from unipar.results.training_summary import TrainingSummary
from unipar.utils.columns import Column, fitting_table, known_columns
from unipar.utils.table import format_table, wrap_lines
from unipar.utils.text import count_of, cut_middle, format_duration, format_size

_FIRST_STEPS: Final = 10
"""Number of first steps whose losses and norms are compared one by one."""

_OF_OBSERVING: Final = ("strategy", "called by", "exit code")
"""Facts that a training that was not observed has in other words, or not at all."""


_SMALLEST_RATIO, _LARGEST_RATIO = 0.1, 10
"""Ratios within which a change is shown in percent."""


@dataclass(frozen=True)
class DifferenceRow:
    """Something that both trainings have, or one of them."""

    what: str
    before: str
    after: str
    verdict: str
    """equal, differs, the change in percent, or in which of both it is."""


@dataclass(frozen=True)
class PhaseRow:
    """Memory at the peak of a phase, before or after."""

    phase: str
    when: str
    peak: PhasePeak
    change: str = ""


@dataclass(frozen=True)
class StepRow:
    """Values of a step that both trainings have."""

    step: int
    losses: tuple[float | None, float | None]
    norms: tuple[float | None, float | None]


def _step_column(head: str, key: str, place: int, text: str) -> Column[StepRow]:
    return Column(head, lambda row: getattr(row, key)[place], text.format, optional=True)


def _digits_column(key: str) -> Column[StepRow]:
    return Column("equal to", lambda row: digits_text(*getattr(row, key)), optional=True)


STEP_COLUMNS: Final[Sequence[Column[StepRow]]] = (
    Column("step", lambda row: row.step),
    _step_column("loss before", "losses", 0, "{:.7g}"),
    _step_column("after", "losses", 1, "{:.7g}"),
    _digits_column("losses"),
    _step_column("norm before", "norms", 0, "{:.5g}"),
    _step_column("after", "norms", 1, "{:.5g}"),
    _digits_column("norms"),
)
"""Losses and gradient norms of the first steps, and to how many digits they are equal."""


@dataclass(frozen=True)
class TrainingDifference:
    """Changes from `before` to `after`. The text says what is equal and what differs, not which of both is right."""

    before: TrainingSummary
    after: TrainingSummary

    @cached_property
    def setup(self) -> list[DifferenceRow]:
        """Facts and settings that both have: model, optimizer, ranks."""
        facts = [
            DifferenceRow(name, was, now, "equal" if was.lower() == now.lower() else "differs")
            for name, was in self.before.facts.items()
            if (now := self.after.facts.get(name)) is not None and not (name in _OF_OBSERVING and self._mixed)
        ]
        settings = [
            DifferenceRow(name, f"{was:.6g}", f"{now:.6g}", "equal" if was == now else "differs")
            for name, was in self.before.settings.items()
            if (now := self.after.settings.get(name)) is not None
        ]
        rates = self._rates_row()
        return [*facts, *settings, *([rates] if rates is not None else [])]

    @property
    def _mixed(self) -> bool:
        return self.before.kind != self.after.kind

    def _rates_row(self) -> DifferenceRow | None:
        """Return whether the learning rates by step are equal, at the first step at which they are not."""
        steps = sorted(self.before.rates.keys() & self.after.rates.keys())
        if not steps:
            return None
        pairs = [(step, tuple(dict.fromkeys(self.before.rates[step])), self.after.rates[step]) for step in steps]
        other = [(step, was, tuple(dict.fromkeys(now))) for step, was, now in pairs if was != tuple(dict.fromkeys(now))]
        step, was, now = other[0] if other else (steps[-1], pairs[-1][1], pairs[-1][1])
        name = f"rate at step {step}" if other else f"rates of {count_of(len(steps), 'step')}"
        return DifferenceRow(name, _rates_text(was), _rates_text(now), "differs" if other else "equal")

    @cached_property
    def times(self) -> list[DifferenceRow]:
        """Time of a step, its parts, and the share of waiting."""
        rows = [_number_row("a step", self.before.seconds, self.after.seconds, format_duration)]
        if self.before.parts and self.after.parts:
            rows += [
                _number_row(part, self.before.parts.get(part), self.after.parts.get(part), format_duration)
                for part in STEP_PARTS
            ]
        both = self.before.waiting, self.after.waiting
        if None not in both:
            was, now = (f"{waiting or 0:.1%}" for waiting in both)
            rows.append(DifferenceRow("waits", was, now, "equal" if was == now else "differs"))
        return [row for row in rows if row is not None]

    @cached_property
    def sent(self) -> list[DifferenceRow]:
        """Bytes sent in a step by collective and group; none unless both were recorded."""
        was, now = self.before.sent, self.after.sent
        if was is None or now is None:
            return []
        rows = [_number_row(name, was.get(name), now.get(name), format_size, alone=True) for name in {**was, **now}]
        total = _number_row("sent in all", sum(was.values()), sum(now.values()), format_size)
        return [row for row in (*rows, total) if row is not None]

    @cached_property
    def phases(self) -> list[tuple[str, PhasePeak | None, PhasePeak | None]]:
        """Memory at the peak of each phase, before and after; none unless both were recorded."""
        was, now = ({phase.name: phase for phase in each.phases} for each in (self.before, self.after))
        if not was or not now:
            return []
        return [(name, was.get(name), now.get(name)) for name in MEMORY_PHASES if name in was or name in now]

    @cached_property
    def categories(self) -> list[tuple[str, DifferenceRow]]:
        """Bytes by phase and category, before and after; categories that neither holds are left out."""
        rows: list[tuple[str, DifferenceRow]] = []
        for name, was, now in self.phases:
            if was is None or now is None:
                continue
            peak = _number_row("peak", was.peak, now.peak, format_size)
            held = [
                _number_row(c, was.held.get(c), now.held.get(c), format_size, alone=True)
                for c in CATEGORIES
                if was.held.get(c) or now.held.get(c)
            ]
            rows += [(name, row) for row in (peak, *held) if row is not None]
        return rows

    @cached_property
    def steps(self) -> list[StepRow]:
        """Losses and norms of the first steps that both have."""
        one, two = self.before, self.after
        common = (one.losses.keys() & two.losses.keys()) | (one.norms.keys() & two.norms.keys())
        return [
            StepRow(
                step,
                _both(one.losses.get(step), two.losses.get(step)),
                _both(one.norms.get(step), two.norms.get(step)),
            )
            for step in sorted(common)[:_FIRST_STEPS]
        ]

    @property
    def agreements(self) -> list[str]:
        """Sentences on the digits to which losses and norms of the first steps are equal."""
        named = [
            ("losses", self.before.losses, self.after.losses),
            ("norms before the clip", self.before.norms, self.after.norms),
            ("norms in the optimizer", self.before.norms_after, self.after.norms_after),
        ]
        return [text for name, was, now in named if (text := _describe_agreement(name, was, now))]

    @property
    def loss_notes(self) -> list[str]:
        """Sentences on which losses these are."""
        several = [t for t in (self.before, self.after) if t.kind == "observation" and t.facts.get("ranks") != "1"]
        return ["loss of an observed command: the mean of its ranks' losses"] if several and self.steps else []

    @property
    def findings(self) -> list[tuple[str, TrainingFinding]]:
        """Findings that are new or gone, or in both; none unless both were compared between their ranks."""
        was, now = self.before.findings, self.after.findings
        if was is None or now is None:
            return []
        old, kinds = {finding.kind for finding in was}, {finding.kind for finding in now}
        return [
            *(("in both" if finding.kind in old else "new", finding) for finding in now),
            *(("gone", finding) for finding in was if finding.kind not in kinds),
        ]

    def headline(self) -> str:
        """Return the differences that matter most in one sentence."""
        differing = [row.what for row in self.setup if row.verdict != "equal"]
        parts: list[str] = []
        if self.phases:
            was, now = (max(phase.peak for phase in each.phases) for each in (self.before, self.after))
            parts.append(f"peak {format_size(was)} to {format_size(now)} ({_change(was, now)})")
        if self.before.seconds and self.after.seconds:
            was, now = self.before.seconds, self.after.seconds
            parts.append(f"a step {format_duration(was)} to {format_duration(now)} ({_change(was, now)})")
        if self.agreements:
            parts.append(self.agreements[0].partition(", furthest")[0].replace(":", ""))
        changed = [state for state, _ in self.findings if state != "in both"]
        parts += [f"{changed.count(state)} {state}" for state in ("new", "gone") if state in changed and changed]
        if changed:
            parts[-1] += f" {'finding' if changed.count(changed[-1]) == 1 else 'findings'}"
        parts += [f"{', '.join(differing)} {'differs' if len(differing) == 1 else 'differ'}"] if differing else []
        text = "; ".join(parts) if parts else "the two have nothing in common that could be compared"
        return f"{text[:1].upper()}{text[1:]}"

    def table(self, width: int = 80) -> str:
        """Return the difference as text."""
        blocks = [
            [f"before: {self._name(self.before)}", f"after: {self._name(self.after)}"],
            self._rows_lines(width),
            self._memory_lines(width),
            self._step_lines(width),
            wrap_lines(
                [describe_finding(finding, state=state) for state, finding in self.findings], width, at_hyphens=False
            ),
        ]
        return "\n\n".join("\n".join(block) for block in blocks if block)

    def _name(self, training: TrainingSummary) -> str:
        return f"{training.folder} ({training.label})"

    def _rows_lines(self, width: int) -> list[str]:
        rows = [row for row in self.setup if row.verdict != "equal"]
        rows += [*self.times, *self.sent]
        equal = [row.what for row in self.setup if row.verdict == "equal"]
        said = wrap_lines([f"equal: {', '.join(equal)}"] if equal else [], width, at_hyphens=False)
        if not rows:
            return said
        most = max((width - max(len(row.what) for row in rows) - 16) // 2, 12)
        texts = [[row.what, cut_middle(row.before, most), cut_middle(row.after, most), row.verdict] for row in rows]
        return [*format_table(("", "before", "after", ""), texts, width=width).splitlines(), *said]

    def _memory_lines(self, width: int) -> list[str]:
        rows = [row for phase in self.phases for row in _phase_rows(*phase)]
        if not rows:
            return []
        columns = [
            Column[PhaseRow]("MiB", lambda row: row.phase, right=False),
            Column[PhaseRow]("", lambda row: row.when, right=False),
            Column[PhaseRow]("peak", lambda row: row.peak.peak, format_mib),
            *(
                category_column(head, group).of(_peak_of)
                for head, group in group_categories(row.peak for row in rows).items()
            ),
            Column[PhaseRow]("change", lambda row: row.change, right=False, dropped=1),
        ]
        return [line for block in fitting_table(columns, rows, width=width)[1] for line in block]

    def _step_lines(self, width: int) -> list[str]:
        if not self.steps:
            return []
        columns = known_columns(STEP_COLUMNS, self.steps)
        lines = [line for block in fitting_table(columns, self.steps, width=width)[1] for line in block]
        return [*lines, *wrap_lines([*self.agreements, *self.loss_notes], width, at_hyphens=False)]


def _peak_of(row: PhaseRow) -> PhasePeak:
    return row.peak


def _phase_rows(name: str, was: PhasePeak | None, now: PhasePeak | None) -> list[PhaseRow]:
    if was is not None and now is not None and was.held == now.held:
        return [PhaseRow(name, "both", now, "equal")]
    rows = [] if was is None else [PhaseRow(name, "before", was)]
    if now is not None:
        rows.append(PhaseRow("" if rows else name, "after", now, "" if was is None else _change(was.peak, now.peak)))
    return rows


def _number_row(
    name: str, was: float | None, now: float | None, text: Callable[[float], str], *, alone: bool = False
) -> DifferenceRow | None:
    """Return the row of a number; None unless both have it; `alone`: or one of them."""
    if was is None and now is None:
        return None
    if was is None or now is None:
        if not alone:
            return None
        words = ["-" if value is None else text(value) for value in (was, now)]
        return DifferenceRow(name, words[0], words[1], "only before" if now is None else "only after")
    return DifferenceRow(name, text(was), text(now), _change(was, now))


def _change(was: float, now: float) -> str:
    if was == now:
        return "equal"
    if not was:
        return "only after"
    ratio = now / was
    return f"{100 * (ratio - 1):+.1f} %" if _SMALLEST_RATIO < ratio < _LARGEST_RATIO else f"x {ratio:.3g}"


def _both(was: float | None, now: float | None) -> tuple[float | None, float | None]:
    return (None, None) if was is None or now is None else (was, now)


def digits_text(was: float | None, now: float | None) -> str | None:
    """Return to how many digits two numbers are equal: "all", "5 digits" or "none"; None if one is not known."""
    if was is None or now is None:
        return None
    digits = measure_agreement([now], [was], 0.0).digits
    return "all" if digits is None else "none" if digits == 0 else count_of(digits, "digit")


def _describe_agreement(name: str, was: Mapping[int, float], now: Mapping[int, float]) -> str:
    """Return to how many digits the values of the first common steps are equal, or ""."""
    steps = sorted(was.keys() & now.keys())[:_FIRST_STEPS]
    if not steps:
        return ""
    found = measure_agreement([now[step] for step in steps], [was[step] for step in steps], 0.0)
    over = f"{name} of {count_of(len(steps), 'step')}"
    if found.digits is None:
        return f"{over}: equal, same bits"
    step = steps[found.step - 1]
    apart = f"furthest apart at step {step}: {was[step]:.9g} and {now[step]:.9g}"
    return f"{over}: {'unequal' if found.digits == 0 else f'equal to {found}'}, {apart}"


def _rates_text(rates: Sequence[float]) -> str:
    return ", ".join(f"{rate:.6g}" for rate in rates)
