"""Lengths of samples in tokens: measured once before the first step, and held to when samples are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final

import torch
from torch import Tensor
from torch.utils.data import Dataset
from typing_extensions import override

from unipar.config import BatchSizes
from unipar.data.dataset import SeededDataset
from unipar.data.order import SampleKey
from unipar.errors import ConfigError, TaskError


class HasLength(Protocol):
    """Part of a task that counts tokens."""

    def length(self, sample: Any) -> int:
        """Return the number of tokens of a sample."""
        ...

    def defines(self, name: str) -> bool:
        """Return whether the task defines an optional method itself."""
        ...


@final
@dataclass(frozen=True)
class SampleLengths:
    """Number of tokens of each sample of a dataset, and the task's function that counts them."""

    of: Sequence[int]
    count: Callable[[Any], int]

    @property
    def longest(self) -> int:
        """Tokens of the longest sample."""
        return max(self.of)

    def tokens(self, indices: Sequence[int]) -> int:
        """Return the number of tokens of these samples together, without padding."""
        return sum(self.of[i] for i in indices)


@final
@dataclass(frozen=True)
class TokenRows:
    """Microbatches of samples of one length, as a plan traces them."""

    length: int
    """Tokens of each sample."""

    samples: int
    """Samples of the smallest microbatch that is traced."""

    read: Callable[[int], Any]
    """Function that returns a microbatch of this many samples."""


@final
class MeasuredDataset(Dataset[Any]):
    """Dataset whose samples must be as long, when they are read, as they were when batches were planned."""

    def __init__(self, dataset: Dataset[Any], lengths: SampleLengths) -> None:
        self.dataset, self.lengths = dataset, lengths

    @override
    def __getitem__(self, key: SampleKey) -> Any:
        sample = self.dataset[key]
        now, planned = self.lengths.count(sample), self.lengths.of[key[1]]
        if now != planned:
            raise TaskError(
                f"batch.tokens: sample {key[1]} of data() had {planned} tokens when batches were planned, and has "
                f"{now} in epoch {key[0] + 1}: length(sample) must depend on the index alone; cut or pad samples to "
                "one length each where they are drawn at random"
            )
        return sample

    def __getitems__(self, keys: list[SampleKey]) -> list[Any]:
        """Return several samples; a DataLoader calls it in place of `__getitem__`."""
        return [self[key] for key in keys]


def measure_lengths(
    task: HasLength,
    dataset: Any,
    seed: int,
    sizes: BatchSizes,
    *,
    of: str = "data()",
    share: tuple[int, int] = (0, 1),
    add_up: Callable[[Tensor], Tensor] | None = None,
    report: Callable[[int, int], None] | None = None,
) -> SampleLengths | None:
    """Return the lengths of all samples; None if batches are counted in samples.

    `share`: this rank and their number, of which each reads a part, and `add_up`
    adds a tensor over them. `report` is called with the samples that are measured and their number. Raise if the task
    does not say how long a sample is, or one is too long.
    """
    if sizes.tokens is None:
        return None
    if not task.defines("length"):
        raise TaskError(
            f"batch.tokens: {sizes.total}: the task has no length(sample); define it, and let it return the number of "
            "tokens of a sample as the dataset gives it"
        )
    seeded, count = SeededDataset(dataset, seed), len(dataset)
    rank, ranks = share
    measured = torch.zeros(count, dtype=torch.int64)
    for done, i in enumerate(range(rank, count, ranks)):
        measured[i] = _checked(task.length(seeded[0, i]), i, of)
        if report is not None:
            report(done, -(-(count - rank) // ranks))
    lengths: list[int] = (measured if add_up is None else add_up(measured)).tolist()
    for sentence in refuse_lengths(lengths, sizes, of):
        raise ConfigError(sentence)
    return SampleLengths(lengths, task.length)


def _checked(length: Any, index: int, of: str) -> int:
    if isinstance(length, Tensor) and length.numel() == 1 and not length.is_floating_point():
        length = int(length)
    if not isinstance(length, int) or isinstance(length, bool) or length < 1:
        raise TaskError(f"length(sample) is {length!r} for sample {index} of {of}; return a whole number above 0")
    return length


def refuse_lengths(lengths: Sequence[int], sizes: BatchSizes, of: str = "data()") -> Iterator[str]:
    """Yield a sentence on the first sample that is longer than the config allows."""
    limits = sizes.tokens
    assert limits is not None
    allowed = [("max_length", limits.max_length), ("tokens", sizes.total), ("micro", limits.micro)]
    for key, most in allowed:
        if most is None or not (over := [i for i, length in enumerate(lengths) if length > most]):
            continue
        first, many = over[0], len(over)
        others = f", as {many - 1} other{'s' * (many > 2)} of {len(lengths)}" if many > 1 else ""
        longest = max(lengths)
        yield (
            f"batch.{key}: {most}: sample {first} of {of} has {lengths[first]} tokens, more than that{others}; cut or "
            f"leave out such samples in the dataset, or raise batch.{key} to the longest one's {longest}"
        )
        return
