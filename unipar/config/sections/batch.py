"""Config section `batch`, and the sizes that follow from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from pydantic import PositiveInt, model_validator

from unipar.config.sections.section import Section
from unipar.errors import ConfigError


@dataclass(frozen=True)
class BatchSizes:
    """Sizes of a batch in a number of ranks: total = micro x accumulate x ranks."""

    total: int
    micro: int
    accumulate: int
    ranks: int


class Batch(Section):
    """Config section `batch`: any two of the three numbers give the third; `total` alone means accumulate 1."""

    total: PositiveInt | None = None
    """Samples in one optimizer step, over all ranks."""

    micro: PositiveInt | None = None
    """Samples in one forward pass on one rank."""

    accumulate: PositiveInt | None = None
    """Forward passes on one rank in one optimizer step."""

    @model_validator(mode="after")
    def _two_numbers(self) -> Self:
        if self.total is None and (self.micro is None or self.accumulate is None):
            given = {k: v for k, v in (("micro", self.micro), ("accumulate", self.accumulate)) if v}
            text = ", ".join(f"{k}: {v}" for k, v in given.items()) or "none"
            raise ValueError(f"two of total, micro and accumulate are needed (or total alone); given: {text}")
        return self

    def settle(self, ranks: int) -> BatchSizes:
        """Return the sizes for a number of ranks; raise ConfigError, which shows the arithmetic, if they do not fit."""
        total, micro, accumulate = self.total, self.micro, self.accumulate
        if total is None:
            assert micro is not None
            assert accumulate is not None
            return BatchSizes(micro * accumulate * ranks, micro, accumulate, ranks)
        if micro is None:
            accumulate = accumulate or 1
            if total % (accumulate * ranks):
                raise ConfigError(
                    f"batch.total ({total}) is not a multiple of accumulate x data "
                    f"({accumulate} x {ranks} = {accumulate * ranks})" + _suggest_totals(total, accumulate * ranks)
                )
            return BatchSizes(total, total // (accumulate * ranks), accumulate, ranks)
        if total % (micro * ranks):
            raise ConfigError(
                f"batch.total ({total}) is not a multiple of micro x data "
                f"({micro} x {ranks} = {micro * ranks})" + _suggest_totals(total, micro * ranks)
            )
        if accumulate is not None and total != micro * accumulate * ranks:
            raise ConfigError(
                f"batch.total ({total}) is not micro x accumulate x data ({micro} x {accumulate} x {ranks} = "
                f"{micro * accumulate * ranks}); leave one of the three out"
            )
        return BatchSizes(total, micro, total // (micro * ranks), ranks)


def _suggest_totals(total: int, step: int) -> str:
    near = [n for n in (total // step * step, (total // step + 1) * step) if n]
    return f"; the nearest totals are {' and '.join(map(str, near))}" if len(near) > 1 else f"; the smallest is {step}"
