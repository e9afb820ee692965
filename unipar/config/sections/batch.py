"""Config section `batch`, and the sizes that follow from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, Self

from pydantic import PositiveInt, model_validator

from unipar.config.sections.section import Section
from unipar.config.sections.size import Bytes, Fraction
from unipar.errors import ConfigError


@dataclass(frozen=True)
class TokenLimits:
    """Limits of a batch that is counted in tokens, beside its budget."""

    micro: int | None
    """Padded tokens of a microbatch at most; None: a step has `accumulate` microbatches on each rank."""

    accumulate: int | None
    max_length: int | None
    """Tokens of a sample at most; None: as many as a microbatch, or the budget, can hold."""

    packed: bool
    """Whether the samples of a microbatch are laid one after another, so that none is padded."""


@dataclass(frozen=True)
class BatchSizes:
    """Sizes of a batch in a number of ranks: total = micro x accumulate x ranks.

    Under `batch.tokens` all are in tokens: total is the budget, and each step has as many microbatches as it needs.
    """

    total: int
    micro: int
    accumulate: int
    ranks: int
    tokens: TokenLimits | None = None
    """Limits if the batch is counted in tokens; None: it is counted in samples."""

    @property
    def unit(self) -> Literal["samples", "tokens"]:
        """Unit in which the batch is counted."""
        return "samples" if self.tokens is None else "tokens"

    @property
    def local(self) -> int:
        """Samples of a rank in one step; under `batch.tokens` its part of the budget, rounded up."""
        return self.total // self.ranks if self.tokens is None else -(-self.total // self.ranks)

    @property
    def varies(self) -> bool:
        """Whether each step has a number of microbatches of its own: as many as hold its tokens."""
        return self.tokens is not None and self.tokens.micro is not None

    @property
    def steady_accumulate(self) -> int:
        """Microbatches on a rank in every step; 1 if each step has a number of its own."""
        return 1 if self.varies else self.accumulate

    @property
    def possible_micros(self) -> list[int]:
        """Sizes that a microbatch of samples may have with the same total, ascending: divisors of the local batch."""
        return [micro for micro in range(1, self.local + 1) if self.local % micro == 0]

    def with_micro(self, micro: int) -> BatchSizes:
        """Return the sizes with microbatches of another possible size, and the same total."""
        if self.tokens is not None:
            limits = replace(self.tokens, micro=micro, accumulate=None)
            return replace(self, micro=micro, accumulate=-(-self.total // (micro * self.ranks)), tokens=limits)
        return replace(self, micro=micro, accumulate=self.local // micro)


class Batch(Section):
    """Config section `batch`: any two of the three numbers give the third; `total` alone means accumulate 1.

    With `micro: auto` the largest microbatch that fits in memory is found, and `total` kept. With `tokens` in place of
    `total`, batches have samples of any length, and `micro` and `accumulate` exclude each other.
    """

    total: PositiveInt | None = None
    """Samples in one optimizer step, over all ranks."""

    tokens: PositiveInt | None = None
    """Tokens in one optimizer step at most, over all ranks and without padding, in place of `total`; the task's
    length(sample) counts them."""

    max_length: PositiveInt | None = None
    """Tokens that a sample may have under `tokens`; null: as many as fit. A longer one is refused."""

    rows: Literal["padded", "packed"] = "padded"
    """Rows of a microbatch under `tokens`, in which `micro` counts. padded: each as long as the longest sample of the
    microbatch; packed: samples laid one after another by the task's collate."""

    memory_check: bool = False
    """Whether the largest microbatches under `tokens` are tried before the first step, on a model of their own."""

    micro: PositiveInt | Literal["auto"] | None = None
    """Samples in one forward pass on one rank; auto: the most that fit in memory, found by trial before the run. Under
    `tokens`: tokens with padding, at most."""

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

    @property
    def unit(self) -> Literal["samples", "tokens"]:
        """Unit in which the batch is counted."""
        return "samples" if self.tokens is None else "tokens"

    @property
    def size(self) -> int | None:
        """Samples, or tokens, in one optimizer step; None if it depends on the number of ranks."""
        return self.tokens or self.total

    def require_samples(self, what: str) -> None:
        """Raise ConfigError if the batch is counted in tokens, which `what`, a sentence without its end, rules out."""
        if self.tokens is not None:
            raise ConfigError(
                f"batch.tokens: {self.tokens}: {what}; say how many samples a step has instead, as in "
                "--set 'batch={total: 32, micro: 4}'"
            )

    def _check_tokens(self, tokens: int) -> None:
        if self.total is not None:
            raise ValueError(f"tokens ({tokens}) and total ({self.total}) both say how large a step is; leave one out")
        if self.micro == "auto":
            raise ValueError(
                "micro: auto counts samples, and tokens counts tokens; give micro the padded tokens of one forward pass"
            )
        if self.micro is not None and self.accumulate is not None:
            raise ValueError(
                f"under tokens, micro ({self.micro}) and accumulate ({self.accumulate}) both say how many microbatches "
                "a step has; leave one out"
            )
        for key, value in (("tokens", tokens), ("micro", self.micro)):
            if self.max_length is not None and value is not None and value < self.max_length:
                raise ValueError(
                    f"{key} ({value}) is below max_length ({self.max_length}), so that it could not hold the longest "
                    f"sample; raise {key}, or lower max_length"
                )

    @model_validator(mode="after")
    def _two_numbers(self) -> Self:
        if self.tokens is not None:
            self._check_tokens(self.tokens)
            return self
        if self.max_length is not None:
            raise ValueError(
                f"max_length: {self.max_length} has no effect without tokens; leave it out, or give tokens"
            )
        if self.rows == "packed":
            raise ValueError("rows: packed has no effect without tokens; leave it out, or give tokens")
        if self.memory_check:
            raise ValueError(
                "memory_check: true has no effect without tokens: microbatches of samples are of one size; leave it out"
            )
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
            numbers = {k: v for k, v in (("micro", self.micro), ("accumulate", self.accumulate)) if v}
            text = ", ".join(f"{k}: {v}" for k, v in numbers.items()) or "none"
            raise ValueError(f"two of total, micro and accumulate are needed (or total alone); given: {text}")
        return self

    def on_other_ranks(self, before: int, now: int) -> Batch:
        """Return the batch that has as many microbatches in all on `now` ranks as this one on `before`, under `tokens`.

        Those of at most `micro` tokens follow from the lengths of samples.
        """
        assert self.tokens is not None
        if self.micro is not None:
            return self
        return self.model_copy(update={"accumulate": -(-(self.accumulate or 1) * before // now)})

    def derived_keys(self, sizes: BatchSizes) -> Iterator[tuple[str, int, str]]:
        """Yield the sizes that the config does not give, as key, value and reason."""
        micro, accumulate, ranks = self.micro, self.accumulate, sizes.ranks
        if self.size is None:
            yield (
                "batch.total",
                sizes.total,
                f"micro x accumulate x data = {sizes.micro} x {sizes.accumulate} x {ranks}",
            )
            return
        if micro is None and accumulate is None:
            yield "batch.accumulate", 1, f"{'total' if sizes.tokens is None else 'tokens'} alone means 1"
        if sizes.tokens is not None:  # the number of microbatches follows from the lengths of samples
            return
        if micro is None:
            why = f"total / (accumulate x data) = {sizes.total} / ({sizes.accumulate} x {ranks})"
            yield "batch.micro", sizes.micro, why
        elif accumulate is None:
            why = f"total / (micro x data) = {sizes.total} / ({sizes.micro} x {ranks})"
            yield "batch.accumulate", sizes.accumulate, why

    def settle(self, ranks: int) -> BatchSizes:
        """Return the sizes for a number of ranks; raise ConfigError, which shows the arithmetic, if they do not fit."""
        total, micro, accumulate = self.total, self.micro, self.accumulate
        assert micro != "auto", "batch.micro: auto must be found by trial, or replaced, before a batch is settled"
        if self.tokens is not None:
            return self._settle_tokens(self.tokens, micro, ranks)
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

    def _settle_tokens(self, tokens: int, micro: int | None, ranks: int) -> BatchSizes:
        if micro is None:
            each = accumulate = self.accumulate or 1
            padded = -(-tokens // (accumulate * ranks))
        else:
            each, padded, accumulate = None, micro, -(-tokens // (micro * ranks))
        limits = TokenLimits(micro, each, self.max_length, self.rows == "packed")
        return BatchSizes(tokens, padded, accumulate, ranks, limits)


def _suggest_totals(total: int, step: int) -> str:
    near = [n for n in (total // step * step, (total // step + 1) * step) if n]
    return f"; the nearest totals are {' and '.join(map(str, near))}" if len(near) > 1 else f"; the smallest is {step}"
