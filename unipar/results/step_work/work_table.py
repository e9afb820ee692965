"""Work of a step as a text table, a row for each strategy or world, and the remarks below it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from unipar.results.step_work.figures import StepFigures, StrategyWork, differing_counts, flops_of_step
from unipar.utils.table import Remark, format_table_rows, table_remarks
from unipar.utils.text import count_of, flops_scale, format_flops

_MOST_REASONS: Final = 3
"""Number of graph breaks and recompiles whose reasons are below the table; the page has all."""

NO_VALUE: Final = "-"


def work_columns(figures: Sequence[StepFigures]) -> Mapping[str, Callable[[StepFigures], str]]:
    """Return a text of each figure by the head of its column, for the columns in which a strategy has a figure."""
    scale, prefix = flops_scale(one.flops_per_second or 0.0 for one in figures)

    def breaks(one: StepFigures) -> str:
        return NO_VALUE if one.compiled is None else str(one.compiled.break_count)

    def recompiles(one: StepFigures) -> str:
        return NO_VALUE if one.compiled is None else str(one.compiled.recompile_count)

    columns: dict[str, Callable[[StepFigures], str]] = {
        "tokens/s": lambda one: _number(one.tokens_per_second),
        f"{prefix}FLOP/s": lambda one: _number(one.flops_per_second, scale),
        "MFU": lambda one: _percent(one.mfu),
        "waits": lambda one: _percent(one.waiting),
        "breaks": breaks,
        "recompiles": recompiles,
    }
    return {head: of for head, of in columns.items() if any(of(one) != NO_VALUE for one in figures)}


def format_work_table(heads: Sequence[str], rows: Sequence[tuple[Sequence[str], StepFigures]], width: int) -> list[str]:
    """Return the lines of the table, or nothing if no row has a figure.

    `heads`: those of the first columns, whose texts each row has beside its figures. Where the table is too wide, it is
    without operations a second if MFU is there, and then without its last columns.
    """
    known = [(texts, figures) for texts, figures in rows if figures != StepFigures()]
    columns = dict(work_columns([figures for _, figures in known]))
    while columns:
        strategies = [(*texts, *(of(figures) for of in columns.values())) for texts, figures in known]
        right = [i for i, head in enumerate((*heads, *columns)) if head not in ("work", "scaling")]
        blocks = format_table_rows((*heads, *columns), strategies, right=right, width=width, fold=True)
        if len(columns) == 1 or max(len(line) for block in blocks for line in block) <= width:
            return [line for block in blocks for line in block]
        rate = next((head for head in columns if head.endswith("FLOP/s") and "MFU" in columns), None)
        del columns[rate or list(columns)[-1]]
    return []


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
    columns = work_columns(known)
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
    said = [f"{', '.join(names)}: {note}" for note, names in noted.items()]
    shares = [(strategy, work[0].waiting) for strategy, work in ran if len(work) == 1]
    if any(len(work) > 1 and work[0].waits for _, work in ran):
        said += [
            f"{strategy} has no communication, and its thread sleeps for {_percent(share)} of a step: the task waits "
            "for something else, which is in the others' waits too"
            for strategy, share in shares
            if share is not None and share > 0.02
        ]
    return said


def break_reasons(figures: Iterable[StepFigures]) -> list[tuple[str, int, str]]:
    """Return what happened (graph break, recompile), how often at most in a strategy, and why; most frequent first."""
    found: dict[tuple[str, str], int] = {}
    for one in figures:
        if one.compiled is not None:
            kinds = (("graph break", one.compiled.breaks), ("recompile", one.compiled.recompiles))
            for kind, reasons in kinds:
                for why, count in reasons.items():
                    found[kind, why] = max(found.get((kind, why), 0), count)
    return sorted(((kind, count, why) for (kind, why), count in found.items()), key=lambda row: -row[1])


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


def _number(value: float | None, scale: float = 1.0) -> str:
    if value is None:
        return NO_VALUE
    return f"{value / scale:.{0 if value / scale >= 100 else 1 if value / scale >= 10 else 2}f}"


def _percent(value: float | None) -> str:
    return NO_VALUE if value is None else f"{100 * value:.{0 if value >= 0.0995 or value == 0 else 1}f} %"
