"""`gathered`: predictions of all validation samples, for a metric that is no mean over batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

Score = Callable[..., Any]
"""Function of whole columns: it returns a number, or a mapping of names to numbers."""


@final
@dataclass(frozen=True)
class Gathered:
    """One batch's rows of the columns from which a metric is computed when all batches are done."""

    columns: tuple[Any, ...]
    score: Score


def gathered(*columns: Any, score: Score) -> Gathered:
    """Return a metric of `Task.metrics`: `score(*columns)` over all validation samples, in their order.

    Each column is a tensor or an array whose first dimension runs over samples, or a list with one entry for each. They
    are collected from all ranks, without samples that a rank runs twice, and `score` is called once, on one rank.
    """
    if not columns:
        raise TypeError("gathered() takes at least one column, such as predictions and targets")
    return Gathered(columns, score)
