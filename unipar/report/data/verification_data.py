"""Data of a verification's page, read from its folder, and the differences by step that its figures show."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from unipar.report.data.comparison_data import read_config_keys
from unipar.results.result_files import original_config_path, parse_verdicts, read_mapping
from unipar.results.verdicts import Verdict, Verdicts

StepQuantity = Literal["loss", "norm"]
"""Quantity that is known at each step: the loss, or the norm of the gradient."""


@dataclass(frozen=True, kw_only=True)
class VerificationPageData:
    """Data of a verification, as its page shows it."""

    folder: Path
    verdicts: Verdicts
    config: Mapping[str, Any]
    """Config that was verified, by dotted key; empty if no copy was kept."""

    problems: tuple[str, ...] = ()
    """Sentences on files that could not be read."""

    @classmethod
    def read(cls, file: Path) -> Self:
        """Return the verification in a verify.json and beside it."""
        problems: list[str] = []
        verdicts = parse_verdicts(file, read_mapping(file, "verification"))
        asked = original_config_path(file.parent, verdicts.name)
        config = read_config_keys(asked, problems) if asked.exists() else {}
        return cls(folder=file.parent, verdicts=verdicts, config=config, problems=tuple(problems))

    @property
    def judged_strategies(self) -> list[Verdict]:
        """Strategies that ran and were compared with one process."""
        return [row for row in self.verdicts.rows if row.outcome in ("agrees", "disagrees") and row.share is not None]

    def differences(self, quantity: StepQuantity) -> list[tuple[Verdict, list[float]]]:
        """Return each judged strategy with its differences from one process, by step; a missing number is infinite."""
        return [
            (row, [_distance(a, b) for a, b in zip(values, base, strict=False)])
            for row in self.judged_strategies
            if (values := row.losses if quantity == "loss" else row.norms)
            and (base := self.verdicts.base_of(row).get(quantity, []))
        ]

    def step_shares(self, quantity: StepQuantity) -> list[tuple[list[Verdict], list[float]]]:
        """Return the differences as multiples of what is allowed; strategies with the same ones are together."""
        groups: dict[tuple[float, ...], list[Verdict]] = {}
        for row, values in self.differences(quantity):
            allowed = self.verdicts.allowed_for(row).get(quantity, [])
            groups.setdefault(tuple(_share(v, a) for v, a in zip(values, allowed, strict=False)), []).append(row)
        return [(rows, list(shares)) for shares, rows in groups.items() if shares]

    @property
    def quantities(self) -> Sequence[str]:
        """Names of the quantities that were compared, in the order in which they occur in a step."""
        return list(dict.fromkeys(what for row in self.judged_strategies for what in row.shares))


def _distance(one: float, other: float) -> float:
    return abs(one - other) if math.isfinite(one) and math.isfinite(other) else math.inf


def _share(off: float, allowed: float) -> float:
    return 0.0 if off == 0 else off / allowed if allowed else math.inf
