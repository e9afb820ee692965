"""A plan in one screen: what to take, the table without bytes by category, and the next steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from unipar.planning.memory_margin import StrategyPeak, describe_no_difference, measure_margin
from unipar.planning.plan_table import describe_recommendations, merge_refusals, plan_columns, ways_to_fit
from unipar.planning.planned_strategy import UNEVEN, PlannedStrategies, PlannedStrategy
from unipar.planning.recommendation import recommend
from unipar.utils.columns import Reason
from unipar.utils.screen import Screen

_IN_DETAILS_ONLY: Final = (
    *("in", "micro", "param", "grad", "optim", "ema", "comm", "activ", "temp", "runtime"),
    *("sent", "between machines"),
)
"""Columns that the screen leaves to the details."""


def format_plan_screen(plan: PlannedStrategies, width: int, next_steps: Sequence[str] = ()) -> str:
    """Return what to take on each number of ranks, the table, and the next steps."""
    answer, *further = describe_recommendations(plan, shares=False)
    columns = [column for column in plan_columns(plan) if column.head not in _IN_DETAILS_ONLY]
    return Screen(
        answer=answer,
        warnings=[*further, *_limits(plan)],
        columns=[replace(columns[0], head="strategy"), *columns[1:]],
        rows=[*(row for row in plan.rows if not row.refusal), *merge_refusals(plan)],
        reason=lambda row: (
            Reason(kind="refused", text=row.refusal.removeprefix(f"{row.strategy}: ")) if row.refusal else None
        ),
        leading=2,
        next_steps=next_steps,
    ).format(width)


def _limits(plan: PlannedStrategies) -> Iterator[str]:
    """Yield what limits the answer: figures that are estimates or missing, and peaks that are the runtime's."""
    planned = [row for row in plan.rows if not row.refusal]
    nowhere = {each.ranks for each in recommend(plan.rows, plan.limit, exclude=plan.exclude) if each.row is None}
    yield from ways_to_fit(replace(plan, rows=tuple(row for row in planned if row.ranks in nowhere)))
    others = any(not row.fits(plan.limit) for row in planned)
    if others and UNEVEN in plan.notes:
        yield UNEVEN
    yield from (note for note in plan.notes if note.startswith("no seconds"))
    if not others:
        yield from _no_difference(plan, planned)


def _no_difference(plan: PlannedStrategies, planned: Sequence[PlannedStrategy]) -> Iterator[str]:
    """Yield that memory does not tell the strategies of the largest world apart, if what they hold is the runtime's."""
    most = max((row.ranks for row in planned), default=0)
    rows = [row for row in planned if row.ranks == most]
    if len(rows) > 1:
        margin = measure_margin([StrategyPeak(row.strategy, row.peak.held) for row in rows])
        if len(margin.alike) == len(rows) and margin.margin:
            where = f"these strategies on {most} rank{'s' * (most != 1)}"
            yield describe_no_difference(margin, where, plan.parameters)
