"""CSV files of results in bytes and seconds: compare.csv by strategy, scale.csv and worlds.csv by world."""

from __future__ import annotations

from typing import Final

from unipar.memory.account import CATEGORIES
from unipar.results.comparison import Comparison
from unipar.results.scaling import Scaling
from unipar.utils.columns import format_csv

_MEMORY_AND_WORK: Final = (
    *("allocated", "resident", "predicted_on_cuda", "measured_on_cuda", "reserved", "host", *CATEGORIES),
    *("weight_per_s", "step_flops", "flops_per_s", "mfu", "waits_least", "waits_most", "graph_breaks", "recompiles"),
)

COMPARISON_COLUMNS: Final = (
    *("strategy", "outcome", "digits", "within", "median_step_s", "samples_per_s"),
    *_MEMORY_AND_WORK,
    *("planned_peak", "measured_peak", "planned_sent", "measured_sent"),
)
"""Keys of the columns of compare.csv."""

SCALING_COLUMNS: Final = (
    *("strategy", "ranks", "scaling", "samples", "micro", "accumulate", "outcome", "digits", "within"),
    *("median_step_s", "samples_per_s", "speed_up", "efficiency"),
    *_MEMORY_AND_WORK,
)
"""Keys of the columns of scale.csv and worlds.csv."""


def format_comparison_csv(comparison: Comparison) -> str:
    """Return a comparison as CSV; unknown figures are empty, and `digits` is `all` if losses are equal to the bit."""
    return format_csv(COMPARISON_COLUMNS, comparison.columns(), comparison.rows)


def format_scaling_csv(scaling: Scaling) -> str:
    """Return a scaling as CSV, with a row for each world."""
    return format_csv(SCALING_COLUMNS, scaling.columns(), scaling.worlds)
