"""Which samples a rank sees, and when: each exactly once an epoch, in any world."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, final

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler
from typing_extensions import override

from unipar.config import Config, Data, Sizes
from unipar.errors import ConfigError, TaskError
from unipar.seeds import mix, sow
from unipar.world import World

Collate = Callable[[list[Any]], Any]
Key = tuple[int, int]
"""(epoch, index) of one sample."""


@dataclass(frozen=True)
class Order:
    """The global batches of a run: they depend on seed and total batch alone."""

    samples: int
    total: int
    seed: int
    shuffle: bool
    ragged: str

    def __post_init__(self) -> None:
        left = self.samples % self.total
        if self.samples == 0:
            raise TaskError("data() has no samples")
        if left and self.ragged == "error":
            raise ConfigError(
                f"data.ragged: {self.samples} samples are {self.samples // self.total} batches of {self.total} and "
                f"{left} left over; choose weigh or drop, or another batch.total"
            )
        if self.per_epoch == 0:
            raise ConfigError(
                f"data.ragged: drop leaves nothing: {self.samples} samples do not fill one batch of {self.total}"
            )

    @property
    def per_epoch(self) -> int:
        return self.samples // self.total if self.ragged == "drop" else -(-self.samples // self.total)

    def permutation(self, epoch: int) -> list[int]:
        if not self.shuffle:
            return list(range(self.samples))
        generator = torch.Generator().manual_seed(mix(self.seed, 1, epoch))
        return torch.randperm(self.samples, generator=generator).tolist()

    def batches(self, start: int) -> Iterator[tuple[int, list[int]]]:
        """(epoch, indices) of each optimizer step from `start` on, without end."""
        epoch, skip = divmod(start, self.per_epoch)
        while True:
            order = self.permutation(epoch)
            for b in range(skip, self.per_epoch):
                yield epoch, order[b * self.total : (b + 1) * self.total]
            epoch, skip = epoch + 1, 0


def cut(batch: Sequence[int], accumulate: int, ranks: int) -> list[list[Sequence[int]]]:
    """A global batch as [microbatch][rank]; sizes differ by one at most, and may be zero."""
    return [_parts(part, ranks) for part in _parts(batch, accumulate)]


def _parts(batch: Sequence[int], count: int) -> list[Sequence[int]]:
    size, more = divmod(len(batch), count)
    ends = [size * i + min(i, more) for i in range(count + 1)]
    return [batch[a:b] for a, b in pairwise(ends)]


@dataclass(frozen=True)
class Plan:
    """What one rank reads for one microbatch: `keys` is never empty, `weight` may be 0."""

    keys: list[Key]
    weight: float
    """Samples that count, over the samples of the global batch."""


@final
class Sown(Dataset[Any]):
    """Samples read by key, each with random numbers that follow from seed, epoch and index."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset, self.seed = dataset, seed

    @override
    def __getitem__(self, key: Key) -> Any:
        sow(mix(self.seed, 2, *key), cuda=False)
        return self.dataset[key[1]]


@dataclass(frozen=True)
class Source:
    """Where samples come from: what the task gave, and what was taken from its DataLoader."""

    dataset: Any
    collate: Collate
    settings: Data
    taken: dict[str, Any]
    """Further DataLoader arguments of the user's own."""

    @property
    def streams(self) -> bool:
        """Whether samples come one after another instead of by index."""
        return _streams(self.dataset)

    @property
    def length(self) -> int | None:
        """In samples; None for a stream that does not say."""
        try:
            return len(self.dataset)
        except (TypeError, NotImplementedError):
            if self.streams:
                return None
            raise

    def __len__(self) -> int:
        return len(self.dataset)


def _streams(dataset: Any) -> bool:
    if isinstance(dataset, IterableDataset):
        return True
    return callable(getattr(dataset, "__iter__", None)) and not callable(getattr(dataset, "__getitem__", None))


def training_source(given: Any, collate: Collate | None, default: Collate, config: Config, sizes: Sizes) -> Source:
    """What data() returned; keys of `data` that would have no effect on it are refused."""
    source = source_of(given, collate, default, config, sizes)
    told = config.data.model_fields_set
    if source.streams and "shuffle" in told and config.data.shuffle:
        raise ConfigError(
            "data.shuffle: true: data() returned a stream, whose order is its own; shuffle in its __iter__ (the "
            "generators are seeded by train.seed and the epoch), and leave the key out"
        )
    if not source.streams and "stream" in told:
        raise ConfigError(
            f"data.stream: {config.data.stream}: data() returned a map-style dataset, which is divided by index; "
            "leave the key out"
        )
    return source


def source_of(given: Any, collate: Collate | None, default: Collate, config: Config, sizes: Sizes) -> Source:
    """A dataset, or a DataLoader whose dataset, collate_fn and workers are taken."""
    settings = config.data
    if isinstance(given, DataLoader):
        return _from_loader(given, collate, config, sizes)
    if _streams(given):
        return Source(given, collate or default, settings.model_copy(update={"shuffle": False}), {})
    if not callable(getattr(given, "__getitem__", None)) or not callable(getattr(given, "__len__", None)):
        raise TaskError(
            f"data() returned {type(given).__name__}; a dataset with __getitem__ and __len__, a stream, or a "
            "DataLoader, is wanted"
        )
    return Source(given, collate or default, settings, {})


def _from_loader(loader: DataLoader[Any], collate: Collate | None, config: Config, sizes: Sizes) -> Source:
    if loader.batch_size is None:
        what = "a batch_sampler of its own" if loader.batch_sampler is not None else "batch_size=None"
        raise TaskError(f"the DataLoader has {what}; unipar decides which samples are a batch: give batch_size instead")
    if loader.batch_size not in (1, sizes.total, sizes.micro):
        raise TaskError(
            f"the DataLoader's batch_size is {loader.batch_size}; it must be batch.total ({sizes.total}), "
            f"batch.micro ({sizes.micro}) or unset"
        )
    sampler, streams = loader.sampler, _streams(loader.dataset)
    whole: Any = loader.dataset
    shuffle = type(sampler) is RandomSampler and not sampler.replacement and len(sampler) == len(whole)
    if not shuffle and not streams and type(sampler) is not SequentialSampler:
        raise TaskError(
            f"the DataLoader has a sampler of its own ({type(loader.sampler).__name__}); unipar decides which rank "
            "reads which sample: leave it out, and set data.shuffle"
        )
    if loader.generator is not None or getattr(sampler, "generator", None) is not None:
        raise TaskError("the DataLoader has a generator of its own; the order follows from train.seed: leave it out")
    told = config.data.model_fields_set
    said: dict[str, Any] = {"shuffle": shuffle, "workers": loader.num_workers}
    if streams:
        told = told - {"shuffle"}
    if loader.drop_last:
        said["ragged"] = "drop"
    settings = config.data.model_copy(update={k: v for k, v in said.items() if k not in told})
    names = ("worker_init_fn", "timeout", "multiprocessing_context") if settings.workers else ()
    taken = {name: getattr(loader, name) for name in names}
    if settings.workers and loader.prefetch_factor is not None:
        taken["prefetch_factor"] = loader.prefetch_factor
    return Source(loader.dataset, collate or loader.collate_fn, settings, taken)


def agree_on(samples: int, world: World) -> None:
    """Data of another length on another rank would be other batches, or a hang."""
    world.agree(
        "samples",
        str(samples),
        lambda first: (
            f"the data has {samples} samples on rank {world.rank} and {first} on rank 0: every rank must see all "
            "of it, and unipar divides it"
        ),
    )


@final
class Feed:
    """This rank's microbatches, step after step."""

    def __init__(self, source: Source, sizes: Sizes, rank: int | None, seed: int, *, pin: bool = False) -> None:
        """Without a rank: every rank's microbatches, one after another, for a process that stands for all of them."""
        self.source, self.sizes, self.rank, self.seed, self.pin = source, sizes, rank, seed, pin
        settings = source.settings
        self.order = Order(len(source), sizes.total, seed, settings.shuffle, settings.ragged)
        self._dataset = Sown(source.dataset, seed)

    def steps(self, epochs: int) -> int:
        return epochs * self.order.per_epoch

    def place(self, step: int) -> tuple[int, int]:
        """Epoch and batch of the step after `step` ones."""
        return divmod(step, self.order.per_epoch)

    def plans(self, start: int) -> Iterator[list[Plan]]:
        sizes = self.sizes
        for epoch, batch in self.order.batches(start):
            step: list[Plan] = []
            cuts = cut(batch, sizes.accumulate, sizes.ranks)
            for mine in (mine for micro in cuts for mine in (micro if self.rank is None else [micro[self.rank]])):
                keys = [(epoch, i) for i in mine] or [(epoch, batch[0])]  # a real sample that does not count
                step.append(Plan(keys, len(mine) / len(batch)))
            yield step

    def batches(self, start: int) -> Iterator[list[tuple[Any, Plan]]]:
        """From step `start` on, without end."""
        settings = self.source.settings
        if settings.workers == 0:
            for plans in self.plans(start):
                yield [(self.read(plan.keys), plan) for plan in plans]
            return
        loader: DataLoader[Any] = DataLoader(
            self._dataset,
            batch_sampler=_Keys(self, start),  # pyright: ignore[reportArgumentType] - keys, not ints
            collate_fn=self.source.collate,
            num_workers=settings.workers,
            pin_memory=self.pin,
            **self.source.taken,
        )
        ready = iter(loader)
        for plans in self.plans(start):
            yield [(next(ready), plan) for plan in plans]

    def samples(self, step: int) -> int:
        """In the global batch of the step after `step` ones."""
        place = step % self.order.per_epoch
        return min(self.sizes.total, self.order.samples - place * self.sizes.total)

    def read(self, keys: list[Key]) -> Any:
        return self.source.collate([self._dataset[key] for key in keys])

    def spare(self, weigh: Callable[[Any], float]) -> Any:
        """Any batch that weighs something, for a rank that has none."""
        for i in range(len(self.source)):
            batch = self.read([(0, i)])
            if weigh(batch) > 0:
                return batch
        raise TaskError("weight(batch) is 0 for every single sample of the data: there is nothing to train on")


@final
class _Keys:
    """A batch sampler over the plans; iterated in the main process, ahead of the workers."""

    def __init__(self, feed: Feed, start: int) -> None:
        self.feed, self.start = feed, start

    def __iter__(self) -> Iterator[list[Key]]:
        for plans in self.feed.plans(self.start):
            for plan in plans:
                yield plan.keys
