"""Check that a number which `metrics` returns is a mean: a batch's must be that of its halves, averaged."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from unipar.errors import TaskError

MEAN_TOLERANCES = {"fp32": 1e-3, "fp64": 1e-3}
"""Relative difference from which a number is no mean, by precision."""

HALF_PRECISION_TOLERANCE = 3e-2
"""The same where half precision computes."""

Pairs = Mapping[str, tuple[float, float]]
"""Mean and weight of a batch, by name."""


class _Unsplittable(Exception):
    """Control exception for a batch that has something which is not sample by sample."""


def split_in_halves(batch: Any, samples: int) -> tuple[Any, Any] | None:
    """Return the two halves of a batch; None if it is not made of tensors and lists with an entry for each sample."""
    if samples < 2:
        return None
    half = samples // 2
    try:
        return _sliced(batch, samples, slice(0, half)), _sliced(batch, samples, slice(half, samples))
    except _Unsplittable:
        return None


def _sliced(value: Any, samples: int, rows: slice) -> Any:
    if isinstance(value, Tensor | np.ndarray):
        if value.ndim == 0 or len(value) != samples:
            raise _Unsplittable
        return value[rows]
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, dict):
        return type(value)((k, _sliced(v, samples, rows)) for k, v in value.items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_sliced(v, samples, rows) for v in value))
    if isinstance(value, list) and len(value) == samples and all(isinstance(v, str | int | float) for v in value):
        return value[rows]
    if isinstance(value, list | tuple):
        return type(value)(_sliced(v, samples, rows) for v in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return dataclasses.replace(value, **{f.name: _sliced(getattr(value, f.name), samples, rows) for f in fields})
    raise _Unsplittable


def names_that_differ(full: Pairs, first: Pairs, second: Pairs, precision: str) -> list[str]:
    """Return the names of numbers that are not the weighted mean of those of the two halves."""
    return [
        name
        for name in full
        if name in first
        and name in second
        and not _near(full[name][0], mean_of_halves(first[name], second[name]), precision)
    ]


def mean_of_halves(first: tuple[float, float], second: tuple[float, float]) -> float:
    """Return the mean of two pairs of mean and weight; NaN if neither weighs anything."""
    weight = first[1] + second[1]
    return sum(mean * own for mean, own in (first, second) if own) / weight if weight else float("nan")


def _near(one: float, other: float, precision: str) -> bool:
    """Return whether two numbers agree; one that is not finite agrees with any."""
    limit = MEAN_TOLERANCES.get(precision, HALF_PRECISION_TOLERANCE)
    return not abs(one - other) > limit * max(abs(one), abs(other))


def differs(one: Pairs, other: Pairs, name: str, precision: str) -> bool:
    """Return whether the same batch gave two numbers of this name, so that its metric draws random numbers."""
    return not _near(one[name][0], other[name][0], precision)


def refuse_no_mean(name: str, full: Pairs, first: Pairs, second: Pairs) -> TaskError:
    """Return the error for a number that is no mean."""
    halves = mean_of_halves(first[name], second[name])
    return TaskError(
        f"metrics()[{name!r}] is no mean: the first batch gives {full[name][0]:.6g} (weight {full[name][1]:g}), and "
        f"its halves {first[name][0]:.6g} ({first[name][1]:g}) and {second[name][0]:.6g} ({second[name][1]:g}), of "
        f"which the mean is {halves:.6g}, so that the result would depend on how the data is cut; return the pair "
        "(mean, weight) if it is a mean over something else than samples, unipar.gathered(predictions, targets, "
        "score=function) or a torchmetrics Metric if it is none, or set eval.check: false"
    )
