"""One pass over a stream: from its beginning, from a saved state, or past the samples that were read before."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator
from typing import Any, NamedTuple, final

from unipar.utils.seeding import mix_seed, seed_all

READING_ON_ITEMS = 100
"""Number of `ReadingOn` that each data worker yields: of one worker more than of another, batches would be mixed up."""


class ReadPart(NamedTuple):
    """Place of one reader in its part of a stream, within an epoch."""

    read: int = 0
    """Number of samples."""

    state: Any = None
    """Result of the stream's state_dict() there; None if it has none."""

    ended: bool = False
    """Whether the part has no further sample in this epoch."""

    why: str = ""
    """Reason why there is no state."""


class ReadingOn(NamedTuple):
    """Progress of one reader that reads past samples: how many so far, of how many, in how long."""

    read: int
    of: int
    seconds: float
    last: bool
    """Whether the reader yields no more of these."""


@final
class StreamReader:
    """Samples of one pass; random numbers depend on seed, epoch and position, not on the reading process."""

    def __init__(self, dataset: Any, seed: int, epoch: int, part: tuple[int, ...] = (), begin: ReadPart | None = None):
        """`part`: numbers that tell this reader's random numbers from those of others."""
        self._dataset, self._seeds = dataset, (epoch, *part)
        self._seed, self._begin = seed, begin or ReadPart()
        self.read, self.ended = 0, False
        seed_all(mix_seed(seed, 5, *self._seeds), device=False)
        if callable(set_epoch := getattr(dataset, "set_epoch", None)):
            set_epoch(epoch)
        self._samples: Any = None
        state = self._begin.state
        if state is not None and has_state(dataset):
            dataset.load_state_dict(state)
        if self._begin.ended:
            self.read, self.ended = self._begin.read, True
            return
        self._samples = iter(dataset)
        if state is not None:
            if not has_state(dataset):
                self._samples.load_state_dict(state)
            self.read = self._begin.read

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.ended:
            raise StopIteration
        seed_all(mix_seed(self._seed, 2, *self._seeds, self.read), device=False)
        try:
            sample = next(self._samples)
        except StopIteration:
            self.ended = True
            raise
        self.read += 1
        return sample

    def read_on(self) -> Iterator[ReadingOn]:
        """Read past the samples that were read before, and yield READING_ON_ITEMS times how far that is."""
        began, wanted = time.monotonic(), self._begin.read
        for item in range(1, READING_ON_ITEMS + 1):
            while self.read < wanted * item // READING_ON_ITEMS and not self.ended:
                next(self, None)
            yield ReadingOn(self.read, wanted, time.monotonic() - began, item == READING_ON_ITEMS)

    @property
    def too_short(self) -> bool:
        """Whether the stream has ended before the place to which it was to be read on."""
        return self.ended and self.read < self._begin.read

    def place(self) -> ReadPart:
        """Return how far it has read, with the stream's state there."""
        state, why = None, lacks_state(self._dataset, self._samples)
        if not why:
            owner = self._dataset if has_state(self._dataset) else self._samples
            state = owner.state_dict()
        return ReadPart(self.read, state, self.ended, why)

    def packed_place(self) -> bytes:
        """Return `place` as bytes, which a data worker hands over unchanged; without the state if it cannot be sent."""
        place = self.place()
        try:
            return pickle.dumps(place)
        except Exception as e:  # of the user's classes
            why = f"its state cannot be taken out of a data worker ({type(e).__name__}: {e})"
            return pickle.dumps(place._replace(state=None, why=why))


def has_state(stream: Any) -> bool:
    """Return whether a dataset, or an iterator over it, has the methods state_dict and load_state_dict."""
    return all(callable(getattr(stream, name, None)) for name in ("state_dict", "load_state_dict"))


def lacks_state(dataset: Any, samples: Any = None) -> str:
    """Return why a stream cannot be put back to a place, in words; "" if it can.

    `samples`: an iterator over it, which may have the methods instead.
    """
    if not has_state(dataset) and not has_state(samples):
        return f"{type(dataset).__name__} has no state_dict and load_state_dict"
    if _has_shuffle_buffer(dataset):
        return f"the state of {type(dataset).__name__} leaves out the samples in its shuffle buffer"
    return ""


def _has_shuffle_buffer(dataset: Any) -> bool:
    """Return whether a dataset of Hugging Face has a shuffle buffer, whose samples would be lost with its state."""
    waiting = [vars(dataset).get("_ex_iterable")] if hasattr(dataset, "__dict__") else []
    while waiting:
        if (inner := waiting.pop()) is None:
            continue
        if type(inner).__name__ == "BufferShuffledExamplesIterable":
            return True
        waiting += [getattr(inner, "ex_iterable", None), *(getattr(inner, "ex_iterables", None) or ())]
    return False


def seeded_samples(dataset: Any, seed: int, epoch: int) -> Iterator[Any]:
    """Yield one pass of a dataset from its beginning."""
    return StreamReader(dataset, seed, epoch)
