"""`MicrobatchFeed`: one rank's microbatches of a map-style dataset."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, final

from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from unipar.config import BatchSizes
from unipar.data.data_worker import with_worker_start
from unipar.data.dataset import DataSource
from unipar.data.order import DataPosition, MicrobatchPlan, SampleKey, SampleOrder, split_batch
from unipar.errors import TaskError
from unipar.utils.seeding import mix_seed, seed_all


@final
class SeededDataset(Dataset[Any]):
    """Dataset read by (epoch, index); each sample has random numbers that depend only on seed, epoch and index."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset, self.seed = dataset, seed

    @override
    def __getitem__(self, key: SampleKey) -> Any:
        seed_all(mix_seed(self.seed, 2, *key), cuda=False)
        return self.dataset[key[1]]


@final
class MicrobatchFeed:
    """Microbatches of one rank, in the order of steps."""

    def __init__(
        self, source: DataSource, sizes: BatchSizes, rank: int | None, seed: int, *, pin: bool = False
    ) -> None:
        """Create the feed of one rank; with rank None, of all ranks one after another, for a single process."""
        self.source, self.sizes, self.rank, self.seed, self.pin = source, sizes, rank, seed, pin
        settings = source.settings
        self.order = SampleOrder(len(source), sizes.total, seed, settings.shuffle, settings.ragged)
        self._dataset = SeededDataset(source.dataset, seed)

    def steps(self, epochs: int) -> int:
        """Return the number of optimizer steps in so many epochs."""
        return self.order.steps(epochs)

    def place(self, step: int) -> tuple[int, int]:
        """Return the epoch and the batch within it of the next step, when `step` steps are done."""
        _, epoch, sample = self.position(step)
        return epoch, sample // self.sizes.total

    def position(self, step: int) -> DataPosition:
        """Return the place in the data of the next step, when `step` steps are done."""
        return self.order.position(step)

    def go_on_from(self, begin: DataPosition) -> None:
        """Read from this place on, where another run stopped, perhaps with batches of another size."""
        self.order = replace(self.order, begin=begin)

    def plans(self, start: int) -> Iterator[list[MicrobatchPlan]]:
        """Yield the plans of each step's microbatches, from step `start` on, without end."""
        sizes = self.sizes
        for epoch, batch in self.order.batches(start):
            step: list[MicrobatchPlan] = []
            cuts = split_batch(batch, sizes.accumulate, sizes.ranks)
            for mine in (mine for micro in cuts for mine in (micro if self.rank is None else [micro[self.rank]])):
                keys = [(epoch, i) for i in mine] or [(epoch, batch[0])]  # a real sample that does not count
                step.append(MicrobatchPlan(keys, len(mine) / len(batch)))
            yield step

    def batches(self, start: int) -> Iterator[list[tuple[Any, MicrobatchPlan]]]:
        """Yield each step's microbatches with their plans, from step `start` on, without end."""
        settings = self.source.settings
        if settings.workers == 0:
            for plans in self.plans(start):
                yield [(self.read(plan.keys), plan) for plan in plans]
            return
        loader: DataLoader[Any] = DataLoader(
            self._dataset,
            batch_sampler=_PlannedKeys(self, start),  # pyright: ignore[reportArgumentType] - keys, not ints
            collate_fn=self.source.collate,
            num_workers=settings.workers,
            pin_memory=self.pin,
            **with_worker_start(self.source.loader_arguments),
        )
        ready = iter(loader)
        for plans in self.plans(start):
            yield [(next(ready), plan) for plan in plans]

    def samples(self, step: int) -> int:
        """Return the size of the global batch of the next step, when `step` steps are done."""
        return min(self.sizes.total, self.order.samples - self.position(step).sample)

    def read(self, keys: list[SampleKey]) -> Any:
        """Return the batch that collate makes of these samples."""
        return self.source.collate([self._dataset[key] for key in keys])

    def batch_with_weight(self, weigh: Callable[[Any], float]) -> Any:
        """Return a batch of positive weight, for a rank whose own microbatches have none."""
        for i in range(len(self.source)):
            batch = self.read([(0, i)])
            if weigh(batch) > 0:
                return batch
        raise TaskError("weight(batch) is 0 for every single sample of the data: there is nothing to train on")


@final
class _PlannedKeys:
    """Batch sampler over the plans; the main process iterates over it, ahead of the workers."""

    def __init__(self, feed: MicrobatchFeed, start: int) -> None:
        self.feed, self.start = feed, start

    def __iter__(self) -> Iterator[list[SampleKey]]:
        for plans in self.feed.plans(self.start):
            for plan in plans:
                yield plan.keys
