"""Config section `batch`, and the sizes that follow from it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, Self

from pydantic import PositiveInt, model_validator

from unipar.config.sections.section import Section
from unipar.config.sections.size import Bytes, Fraction
from unipar.errors import ConfigError


@dataclass(frozen=True)
class BatchSizes:
    """Sizes of a batch in a number of ranks: total = micro x accumulate x ranks."""

    total: int
    micro: int
    accumulate: int
    ranks: int

    @property
    def share(self) -> int:
        """Samples of a rank in one step."""
        return self.total // self.ranks

    @property
    def possible_micros(self) -> list[int]:
        """Sizes that a microbatch may have with the same total, ascending: divisors of a rank's share."""
        return [micro for micro in range(1, self.share + 1) if self.share % micro == 0]

    def with_micro(self, micro: int) -> BatchSizes:
        """Return the sizes with microbatches of another possible size, and the same total."""
        return replace(self, micro=micro, accumulate=self.share // micro)


class Batch(Section):
    """Config section `batch`: any two of the three numbers give the third; `total` alone means accumulate 1.

    With `micro: auto` the largest microbatch that fits in memory is found, and `total` kept.
    """

    total: PositiveInt | None = None
    """Samples in one optimizer step, over all ranks."""

    micro: PositiveInt | Literal["auto"] | None = None
    """Samples in one forward pass on one rank; auto: the most that fit in memory, found by trial before the run."""

    accumulate: PositiveInt | None = None
    """Forward passes on one rank in one optimizer step."""

    memory: Bytes | None = None
    """Memory that a rank may use under `micro: auto`, such as 80GiB; null: what its GPU has. Needed on the CPU, where
    it counts what ranks allocate once they have met. Also the limit of `unipar plan` and of compare's page."""

    headroom: Fraction = 0.05
    """Share of that memory that stays free under `micro: auto`: 5% or 0.05."""

    @property
    def is_auto(self) -> bool:
        """Whether the microbatch is to be found by trial."""
        return self.micro == "auto"

    def limit_of(self, memory: int) -> int:
        """Return how many bytes of so much memory may be used."""
        return int(memory * (1.0 - self.headroom))

    @model_validator(mode="after")
    def _two_numbers(self) -> Self:
        if self.is_auto:
            if self.total is None:
                raise ValueError(
                    "micro: auto keeps the total batch, and there is none; give total, the samples of one step"
                )
            if self.accumulate is not None:
                raise ValueError(
                    f"micro: auto decides how often to accumulate; leave out accumulate: {self.accumulate}, or give "
                    "micro a number"
                )
            return self
        if self.total is None and (self.micro is None or self.accumulate is None):
            given = {k: v for k, v in (("micro", self.micro), ("accumulate", self.accumulate)) if v}
            text = ", ".join(f"{k}: {v}" for k, v in given.items()) or "none"
            raise ValueError(f"two of total, micro and accumulate are needed (or total alone); given: {text}")
        return self

    def settle(self, ranks: int) -> BatchSizes:
        """Return the sizes for a number of ranks; raise ConfigError, which shows the arithmetic, if they do not fit."""
        total, micro, accumulate = self.total, self.micro, self.accumulate
        assert micro != "auto", "batch.micro: auto must be found by trial, or replaced, before a batch is settled"
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
