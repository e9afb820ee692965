"""CSV files of results in bytes and seconds: compare.csv by strategy, scale.csv and worlds.csv by world."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from statistics import median
from typing import Final

from unipar.memory.account import CATEGORIES
from unipar.planning.cuda_total import MeasuredCudaMemory, total_on_cuda
from unipar.results.comparison import Comparison
from unipar.results.forecast.forecast_difference import ForecastDifference, forecast_differences
from unipar.results.loss_agreement import Agreement
from unipar.results.memory_tables import largest_account, largest_host_bytes, largest_resident_bytes
from unipar.results.row import StrategyResult
from unipar.results.scaling import Scaling
from unipar.results.step_work.figures import StepFigures

AGREEMENT_COLUMNS: Final = ("digits", "within")
TIME_COLUMNS: Final = ("median_step_s", "samples_per_s")
MEMORY_COLUMNS: Final = (
    "allocated",
    "resident",
    "predicted_on_cuda",
    "measured_on_cuda",
    "reserved",
    "host",
    *CATEGORIES,
)
WORK_COLUMNS: Final = (
    "weight_per_s",
    "step_flops",
    "flops_per_s",
    "mfu",
    "waits_least",
    "waits_most",
    "graph_breaks",
    "recompiles",
)
FORECAST_COLUMNS: Final = ("planned_peak", "measured_peak", "planned_sent", "measured_sent")
"""Predicted and measured bytes of the fullest rank; measured without what libraries and Python hold for themselves."""

COMPARISON_COLUMNS: Final = (
    "strategy",
    "outcome",
    *AGREEMENT_COLUMNS,
    *TIME_COLUMNS,
    *MEMORY_COLUMNS,
    *WORK_COLUMNS,
    *FORECAST_COLUMNS,
)
WORLD_COLUMNS: Final = ("ranks", "scaling", "samples", "micro", "accumulate")
SPEED_UP_COLUMNS: Final = ("speed_up", "efficiency")
SCALING_COLUMNS: Final = (
    "strategy",
    *WORLD_COLUMNS,
    "outcome",
    *AGREEMENT_COLUMNS,
    *TIME_COLUMNS,
    *SPEED_UP_COLUMNS,
    *MEMORY_COLUMNS,
    *WORK_COLUMNS,
)


def format_comparison_csv(found: Comparison) -> str:
    """Return a comparison as CSV; unknown figures are empty, and `digits` is `all` if losses are equal to the bit."""
    figures = found.step_figures()
    planned = {each.strategy: each for each in forecast_differences(found.forecast, found.rows)}
    return _to_csv(
        COMPARISON_COLUMNS,
        (
            [
                row.strategy,
                row.outcome,
                *_agreement_strategies(found.agreement(row)),
                *_time_strategies(found, row),
                *_memory_strategies(row, found.rank_count(row)),
                *_work_strategies(found.step_flops(row), figures[row.strategy]),
                *_forecast_strategies(planned.get(row.strategy)),
            ]
            for row in found.rows
        ),
    )


def format_scaling_csv(found: Scaling) -> str:
    """Return a scaling as CSV, with a row for each world."""
    return _to_csv(
        SCALING_COLUMNS,
        _scaling_rows(found),
    )


def _scaling_rows(found: Scaling) -> Iterator[list[object]]:
    work = found.step_figures()
    for world in found.worlds:
        row, rate = found.row(world), found.rate(world)
        step = [None, None] if rate is None else [median(row.timed_seconds), rate if found.unit == "samples" else None]
        gains = [*step, found.speed_up(world), found.efficiency(world)]
        sizes = [world.samples, world.micro, world.accumulate] if world.samples else ["", "", ""]
        cut = [world.ranks, world.table_head[-1], *sizes]
        agrees = _agreement_strategies(found.agreement(world))
        figures = ["" if v is None else f"{v:.6g}" for v in gains]
        done = _work_strategies(found.step_flops(row), work[world.name])
        yield [world.strategy, *cut, row.outcome, *agrees, *figures, *_memory_strategies(row, world.ranks), *done]


def _to_csv(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(head)
    writer.writerows(rows)
    return text.getvalue()


def _forecast_strategies(found: ForecastDifference | None) -> list[object]:
    if found is None:
        return [""] * len(FORECAST_COLUMNS)
    sent = found.measured_bytes_sent
    return [found.planned.peak.peak, found.measured.high, found.planned_bytes_sent, "" if sent is None else sent]


def _agreement_strategies(agreement: Agreement | None) -> list[str]:
    if agreement is None:
        return ["", ""]
    return ["all" if agreement.digits is None else str(agreement.digits), "yes" if agreement.within else "no"]


def _time_strategies(found: Comparison, row: StrategyResult) -> list[str]:
    if not row.timed_seconds or row.outcome != "ran":
        return ["", ""]
    middle = median(row.timed_seconds)
    return [f"{middle:.6g}", f"{found.samples / middle:.6g}" if found.unit == "samples" else ""]


def _work_strategies(flops: float | None, one: StepFigures) -> list[str]:
    if one == StepFigures():
        return [""] * len(WORK_COLUMNS)
    known = (one.tokens_per_second, flops, one.flops_per_second, one.mfu, one.waiting, one.most_waiting)
    compiled = () if one.compiled is None else (one.compiled.break_count, one.compiled.recompile_count)
    return ["" if v is None else f"{v:.6g}" for v in (*known, *(compiled or (None, None)))]


def _memory_strategies(row: StrategyResult, ranks: int) -> list[str]:
    """Return the memory of the largest rank, whose categories add up to `allocated`; empty for a failed strategy."""
    if not row.memory or row.outcome in ("failed", "unlike"):
        return [""] * len(MEMORY_COLUMNS)
    account = largest_account(row.memory)
    took = total_on_cuda(account, ranks)
    on_cuda = (None, took.total) if isinstance(took, MeasuredCudaMemory) else (took.total, None)
    sizes = [
        account.peak.peak,
        largest_resident_bytes(row.memory),
        *on_cuda,
        account.reserved,
        largest_host_bytes(row.memory),
    ]
    return ["" if s is None else str(s) for s in [*sizes, *(account.peak.held.get(c, 0) for c in CATEGORIES)]]
