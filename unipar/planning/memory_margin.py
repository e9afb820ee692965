"""Whether memory tells strategies apart at a model's size, and from which size on it would."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from unipar.backend import Category
from unipar.utils.text import format_size

_NOT_OF_TRAINING: Final[tuple[Category, ...]] = ("library", "runtime", "unattributed")
"""Categories that do not grow with the model: what libraries and Python hold for themselves, and the unknown."""

_KEPT: Final[tuple[Category, ...]] = ("parameters", "masters", "optimizer", "averages")
"""Categories that a rank keeps from step to step, and that sharding divides among ranks."""


@dataclass(frozen=True)
class StrategyPeak:
    """Peak of one strategy's fullest rank, by category, measured or predicted."""

    name: str
    held: Mapping[Category, int]
    noise: int = 0
    """Range of the peaks of the recorded steps, in bytes."""

    @property
    def fixed(self) -> int:
        """Bytes that are not of the training."""
        return sum(self.held.get(category, 0) for category in _NOT_OF_TRAINING)

    @property
    def trained(self) -> int:
        """Bytes that are of the training."""
        return sum(self.held.values()) - self.fixed

    @property
    def kept(self) -> int:
        """Bytes of parameters and optimizer states."""
        return sum(self.held.get(category, 0) for category in _KEPT)


@dataclass(frozen=True)
class MemoryMargin:
    """Strategies whose peaks are as near one another as what is not of the training weighs.

    The rule: a difference between two strategies counts if the training of the one holds more bytes less than that of
    the other (`saved`) than the margin. The margin is what runtime, libraries and unattributed bytes weigh at the peak
    of the strategies in question, of the one in which they weigh least, plus the widest range of one strategy's peaks
    over its recorded steps. Bytes of a training grow with the model, and the margin does not. So a model whose
    parameters and optimizer states take k times the bytes is told apart as soon as k times what sharding saves
    of them now exceeds the margin; `factor` is that k. Sharding saves gradients, too, some of them, so that a smaller
    model may do: a GPT-2 for which 880,000 parameters are named is told apart at 710,000.
    """

    alike: tuple[str, ...]
    """Names of the strategies that memory does not tell apart, the smallest first."""

    saved: int
    """Most bytes by which their trainings differ."""

    fixed: tuple[int, int]
    """Bytes that are not of the training, of the strategies in which they weigh least and most."""

    noise: int
    """Widest range of one strategy's peaks."""

    shared_out: int
    """Most bytes of parameters and optimizer states that one of them holds less than another."""

    @property
    def margin(self) -> int:
        """Bytes that a difference must exceed to count."""
        return self.fixed[0] + self.noise

    @property
    def factor(self) -> float | None:
        """Size of the model, in proportion to this one, from which a difference counts; None if none does."""
        return self.margin / self.shared_out if self.shared_out > 0 else None


def measure_margin(strategies: Sequence[StrategyPeak]) -> MemoryMargin:
    """Return which of these strategies are as small as the smallest, within the margin."""
    by_size = sorted(strategies, key=lambda strategy: strategy.trained)
    alike = by_size[:1]
    for strategy in by_size[1:]:
        group = [*alike, strategy]
        if strategy.trained - by_size[0].trained > min(c.fixed for c in group) + max(c.noise for c in group):
            break
        alike = group
    fixed, kept = [strategy.fixed for strategy in alike], [strategy.kept for strategy in alike]
    return MemoryMargin(
        tuple(strategy.name for strategy in alike),
        alike[-1].trained - alike[0].trained,
        (min(fixed), max(fixed)),
        max(strategy.noise for strategy in alike),
        max(kept) - min(kept),
    )


def describe_no_difference(margin: MemoryMargin, which: str, parameters: int) -> str:
    """Return that memory does not tell strategies apart, why, and from which size of the model on it would.

    `which`: words for the strategies; `parameters`: number of the model's parameters, 0 if it is not known.
    """
    low, high = (format_size(size) for size in margin.fixed)
    takes = low if low == high else f"{low} to {high}"
    noise = (
        f", and peaks of one strategy differ by {format_size(margin.noise)}" if margin.noise > margin.fixed[0] else ""
    )
    return (
        f"memory does not tell {which} apart at this size: their trainings differ by {format_size(margin.saved)} at "
        f"most, and runtime and libraries take {takes}{noise}; {_describe_size(margin, parameters)}"
    )


def _describe_size(margin: MemoryMargin, parameters: int) -> str:
    if margin.factor is None:
        return "nor would it at another size: they hold the same parameters and optimizer states"
    if margin.factor <= 1:
        return "other buffers take again what sharding saves"
    if not parameters:
        return f"it would if the model were {_two_digits(margin.factor):,} times as large"
    return f"it would with about {format_count(margin.factor * parameters)} parameters or more"


def format_count(number: float) -> str:
    """Return a large number in words, rounded up to two digits: 940,000, 1.3 million, 12 billion."""
    rounded = _two_digits(number)
    for size, word in ((10**9, "billion"), (10**6, "million")):
        if rounded >= size:
            return f"{rounded / size:.2g} {word}" if rounded < 100 * size else f"{rounded // size} {word}"
    return f"{rounded:,}"


def _two_digits(number: float) -> int:
    """Return a number above 1, rounded up to two digits."""
    unit = 10 ** max(0, math.floor(math.log10(number)) - 1)
    return math.ceil(number / unit) * unit
