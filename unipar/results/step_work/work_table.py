"""Work of a step as a text table, a row for each strategy or world, and the remarks below it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from unipar.profiling.work import CompiledWork
from unipar.results.step_work.figures import StepFigures, StrategyWork, differing_counts, flops_of_step
from unipar.utils.columns import Column, fitting_table
from unipar.utils.table import Remark, table_remarks
from unipar.utils.text import count_of, flops_scale, format_flops

_MOST_REASONS: Final = 3
"""Number of graph breaks and recompiles whose reasons are below the table; the page has all."""


def figure_columns(figures: Sequence[StepFigures]) -> list[Column[StepFigures]]:
    """Return the columns of all figures; operations a second are in the unit that suits these ones."""
    scale, prefix = flops_scale(one.flops_per_second or 0.0 for one in figures)
    compiled: list[Column[CompiledWork]] = [
        Column("breaks", lambda work: work.break_count, key="graph_breaks"),
        Column("recompiles", lambda work: work.recompile_count),
    ]
    return [
        Column("tokens/s", lambda one: one.tokens_per_second, _number, key="weight_per_s"),
        Column(
            f"{prefix}FLOP/s", lambda one: one.flops_per_second, lambda flops: _number(flops / scale), key="flops_per_s"
        ),
        Column("MFU", lambda one: one.mfu, _percent, key="mfu"),
        Column("waits", lambda one: one.waiting, _percent, key="waits_least"),
        Column("waits most", lambda one: one.most_waiting, _percent, key="waits_most"),
        *(column.of(lambda one: one.compiled) for column in compiled),
    ]


def work_columns(figures: Sequence[StepFigures]) -> list[Column[StepFigures]]:
    """Return the columns that a table shows: those in which a strategy has a figure."""
    shown = [column for column in figure_columns(figures) if column.key != "waits_most"]
    return [column for column in shown if any(column.value(one) is not None for one in figures)]


_NamedFigures = tuple[Sequence[str], StepFigures]
"""Texts of the first columns of a row, and its figures."""


def _figures(row: _NamedFigures) -> StepFigures:
    return row[1]


def format_work_table(heads: Sequence[str], rows: Sequence[_NamedFigures], width: int) -> list[str]:
    """Return the lines of the table, or nothing if no row has a figure.

    `heads`: those of the first columns, whose texts each row has beside its figures. Where the table is too wide, it is
    without operations a second if MFU is there, and then without its last columns.
    """
    known = [(texts, figures) for texts, figures in rows if figures != StepFigures()]
    columns = work_columns([figures for _, figures in known])
    if not columns:
        return []
    keys = [column.key for column in columns][::-1]
    order = sorted(keys, key=lambda key: key != "flops_per_s" or "mfu" not in keys)[:-1]
    names: list[Column[_NamedFigures]] = [
        Column(head, lambda row, i=i: row[0][i], right=head not in ("work", "scaling")) for i, head in enumerate(heads)
    ]
    places = [order.index(column.key) + 1 if column.key in order else 0 for column in columns]
    work = [replace(column, dropped=place).of(_figures) for column, place in zip(columns, places, strict=True)]
    blocks = fitting_table([*names, *work], known, width=width, fold=True)[1]
    return [line for block in blocks for line in block]


def describe_work_columns(
    batches: Mapping[int, Sequence[StrategyWork]],
    figures: Mapping[str, StepFigures],
    peak: str,
    *,
    unit: str = "samples",
    reasons: bool = True,
) -> list[Remark]:
    """Return explanations of the columns, and what could not be measured.

    `batches`: strategies by the number of samples in their steps; `peak`: what MFU is in proportion to; `unit`:
    samples, or tokens, of which each step has another number; `reasons`: with the reasons of graph breaks and
    recompiles.
    """
    known, strategies = list(figures.values()), [strategy for group in batches.values() for strategy in group]
    counted = {samples: flops for samples, group in batches.items() if (flops := flops_of_step(group)) is not None}
    columns = [column.head for column in work_columns(known)]
    remarks: list[Remark] = []
    if "tokens/s" in columns:
        of = "tokens, or " if unit == "tokens" else ""
        remarks.append(Remark(column="tokens/s", text=f"tokens/s: {of}units of the task's weight(batch) a second"))
    for head in columns:
        if head.endswith("FLOP/s") and counted:
            says = f"{head}: of all ranks together; forward and backward of a step are {_describe_flops(counted)}"
            if unit == "tokens":
                says = (
                    f"{head}: of all ranks together; a strategy's operations, padding included, are those of one step"
                )
            remarks.append(Remark(column=head, text=f"{says}, without what is computed again"))
    if "MFU" in columns:
        remarks.append(Remark(column="MFU", text=f"MFU: that in proportion to {peak}"))
    if "waits" in columns:
        says = "waits: share of a step in which the rank that waits least waits for communication"
        remarks.append(Remark(column="waits", text=says))
        uneven = [
            f"{strategy} {_percent(one.most_waiting)}"
            for strategy, one in figures.items()
            if one.waiting is not None and one.most_waiting is not None and one.most_waiting - one.waiting > 0.2
        ]
        if uneven:
            remarks += table_remarks(f"one rank waits much longer, for a slower one: {', '.join(uneven)}")
    for samples, flops in counted.items() if unit == "samples" else ():
        if differing := differing_counts(batches[samples]):
            remarks += table_remarks(
                f"the operations of a step were counted otherwise in {', '.join(differing)}; shown with {flops:.6g}"
            )
    why = _describe_reasons(known) if reasons else []
    return [*remarks, *table_remarks(*describe_work_notes(strategies), *why)]


def describe_work_notes(strategies: Iterable[StrategyWork]) -> list[str]:
    """Return each note of the ranks once, with the strategies that have it, and what the measured waiting includes."""
    noted: dict[str, list[str]] = {}
    ran = [(strategy, work) for strategy, work in strategies if work]
    for strategy, work in ran:
        for note in dict.fromkeys(note for rank in work for note in rank.notes):
            noted.setdefault(note, []).append(strategy)
    lines = [f"{', '.join(names)}: {note}" for note, names in noted.items()]
    shares = [(strategy, work[0].waiting) for strategy, work in ran if len(work) == 1]
    if any(len(work) > 1 and work[0].waits for _, work in ran):
        lines += [
            f"{strategy} has no communication, and its thread sleeps for {_percent(share)} of a step: the task waits "
            "for something else, which is in the others' waits too"
            for strategy, share in shares
            if share is not None and share > 0.02
        ]
    return lines


def break_reasons(figures: Iterable[StepFigures]) -> list[tuple[str, int, str]]:
    """Return what happened (graph break, recompile), how often at most in a strategy, and why; most frequent first."""
    counts: dict[tuple[str, str], int] = {}
    for one in figures:
        if one.compiled is not None:
            kinds = (("graph break", one.compiled.breaks), ("recompile", one.compiled.recompiles))
            for kind, reasons in kinds:
                for why, count in reasons.items():
                    counts[kind, why] = max(counts.get((kind, why), 0), count)
    return sorted(((kind, count, why) for (kind, why), count in counts.items()), key=lambda row: -row[1])


def _describe_flops(counted: Mapping[int, float]) -> str:
    """Return the operations of a step, with the samples in it where steps differ: `28 GFLOP with 8 samples`."""
    if len(counted) == 1:
        return format_flops(next(iter(counted.values())))
    first, *rest = sorted(counted.items())
    each = [f"{format_flops(first[1])} with {count_of(first[0], 'sample')}"]
    return ", ".join([*each, *(f"{format_flops(flops)} with {samples}" for samples, flops in rest)])


def _describe_reasons(figures: Iterable[StepFigures]) -> list[str]:
    reasons = break_reasons(figures)
    lines = [f"{kind}{f', {count} times' if count > 1 else ''}: {why}" for kind, count, why in reasons[:_MOST_REASONS]]
    more = len(reasons) - _MOST_REASONS
    return [*lines, *([f"{more} more reasons are on the page"] if more > 0 else [])]


def _number(value: float) -> str:
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def _percent(value: float) -> str:
    return f"{100 * value:.{0 if value >= 0.0995 or value == 0 else 1}f} %"
