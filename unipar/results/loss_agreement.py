"""Agreement of two series of losses: digits, largest difference, tolerance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from typing_extensions import override

from unipar.config import Precision
from unipar.utils.columns import Column

TOLERANCE_STEPS = 20
"""Steps in which the tolerance must be kept: later, training amplifies a difference of one bit."""


def loss_tolerance(precision: Precision) -> float:
    """Return how far a loss may be from that of one process, relative to it if it is above 1.

    Under bf16-master the loss itself is computed in bf16, whose last digit is 0.4 to 0.8 % of it.
    """
    return {"fp32": 2e-6, "fp64": 1e-13, "bf16-master": 2e-2}.get(precision, 5e-3)


@dataclass(frozen=True)
class Agreement:
    """Agreement of two series of losses."""

    digits: int | None
    """Leading digits that are equal in every step; None: all bits are equal."""

    step: int
    """Step (from 1) with the largest difference in proportion to the tolerance, among those of `TOLERANCE_STEPS`."""

    off: float
    """Difference in that step."""

    within: bool
    """Whether that difference is within the tolerance."""

    part: str = ""
    """Name of the part whose losses these are, if the model has several."""

    @property
    def part_suffix(self) -> str:
        """Words " of PART" for a sentence, or "" if there is one part only."""
        return f" of {self.part}" if self.part else ""

    @override
    def __str__(self) -> str:
        if self.digits is None:
            return "same bits"
        return "1 digit" if self.digits == 1 else f"{self.digits} digits"


AGREEMENT_COLUMNS: Final[Sequence[Column[Agreement]]] = (
    Column("digits", lambda agreement: "all" if agreement.digits is None else agreement.digits),
    Column("within", lambda agreement: agreement.within),
)
"""Agreement as CSV files have it; digits are `all` if losses are equal to the bit."""


def agreement_for_readers(agreement: Agreement | None) -> dict[str, Any] | None:
    """Return the agreement as files of results have it, for their readers: nothing reads it back."""
    return None if agreement is None else {"says": str(agreement), **asdict(agreement)}


def measure_agreement(losses: Sequence[float], reference: Sequence[float], allowed: float) -> Agreement:
    """Compare `losses` with `reference`, step by step."""
    assert len(losses) == len(reference) > 0, (len(losses), len(reference))
    pairs = [(abs(a - b), abs(b)) for a, b in zip(losses, reference, strict=True)]
    relative = max(off / size if size else math.inf for off, size in pairs if off) if any(p[0] for p in pairs) else None
    shares = [off / max(1.0, size) for off, size in pairs[:TOLERANCE_STEPS]]
    worst = max(range(len(shares)), key=shares.__getitem__)
    digits = None if relative is None else 0 if relative >= 1 else math.floor(-math.log10(relative))
    return Agreement(digits, worst + 1, pairs[worst][0], shares[worst] <= allowed)
