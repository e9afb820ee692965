"""`MicrobatchLoader`: one rank's microbatches of a map-style dataset."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, final

from torch.utils.data import DataLoader

from unipar.config import BatchSizes
from unipar.data.data_worker import with_worker_start
from unipar.data.dataset import DataSource, SeededDataset
from unipar.data.lengths import MeasuredDataset, SampleLengths
from unipar.data.order import DataPosition, MicrobatchPlan, SampleKey, SampleOrder, split_batch
from unipar.data.sampler_order import Agree, SamplerOrder
from unipar.data.token_order import TokenOrder, split_by_tokens
from unipar.errors import TaskError

_Part = TypeVar("_Part", bound=Sequence[int])


@final
class MicrobatchLoader:
    """Microbatches of one rank, in the order of steps."""

    def __init__(
        self,
        source: DataSource,
        sizes: BatchSizes,
        rank: int | None,
        seed: int,
        *,
        pin: bool = False,
        lengths: SampleLengths | None = None,
        agree: Agree | None = None,
    ) -> None:
        """Create the loader of one rank; with rank None, of all ranks one after another, for a single process.

        `lengths`: of all samples, if the batch is counted in tokens. `agree`: compares the order of a sampler with that
        of rank 0; None: it is not compared.
        """
        self.source, self.sizes, self.rank, self.seed, self.pin = source, sizes, rank, seed, pin
        self.lengths = lengths
        """Lengths of all samples, if the batch is counted in tokens."""

        self._cuts: dict[tuple[int, int | None], list[tuple[slice, Sequence[int]]]] = {}
        """This rank's part of each microbatch and sizes of all ranks' parts, by the size of the batch and the rank."""

        self._dataset: SeededDataset | MeasuredDataset = SeededDataset(source.dataset, seed, source.collate)
        settings = source.settings
        self.sampler: SamplerOrder | None = None
        """Order of the user's own sampler; None: unipar draws the order."""

        if source.sampler is not None:
            self.sampler = SamplerOrder(source.sampler, len(source), seed, agree)
        self.order: SampleOrder | TokenOrder
        if sizes.tokens is None:
            count = len(source) if self.sampler is None else self.sampler.count
            self.order = SampleOrder(count, sizes.total, seed, settings.shuffle, settings.last_batch, draw=self.sampler)
        else:
            assert lengths is not None, "a batch of tokens is planned by the lengths of samples"
            self._dataset = MeasuredDataset(self._dataset, lengths)
            self.order = TokenOrder(
                lengths,
                sizes.total,
                seed,
                shuffle=settings.shuffle,
                last_batch=settings.last_batch,
                sampler=self.sampler,
            )

    def steps(self, epochs: int) -> int:
        """Return the number of optimizer steps in this many epochs."""
        return self.order.steps(epochs)

    def place(self, step: int) -> tuple[int, int]:
        """Return the epoch and the batch within it of the next step, when `step` steps are done."""
        return self.order.place(step)

    def position(self, step: int) -> DataPosition:
        """Return the place in the data of the next step, when `step` steps are done."""
        return self.order.position(step)

    def go_on_from(self, begin: DataPosition) -> None:
        """Read from this place on, where another run stopped, perhaps with batches of another size."""
        self.order = self.order.go_on_from(begin)

    def plans(self, start: int) -> Iterator[list[MicrobatchPlan]]:
        """Yield the plans of each step's microbatches, from step `start` on, without end."""
        for epoch, batch in self.order.batches(start):
            yield [self._plan(part, of_ranks, epoch, batch) for part, of_ranks in self._own_parts(batch)]

    def _own_parts(self, batch: Sequence[int]) -> Sequence[tuple[Sequence[int], Sequence[int]]]:
        """Return this rank's part of each microbatch, and the sizes of all ranks'; with rank None, all ranks' parts."""
        if self.lengths is not None:
            return self._of_rank(split_by_tokens(batch, self.lengths.of, self.sizes))
        cuts = self._cuts.get((size := len(batch), self.rank))
        if cuts is None:  # batches of one size are cut alike
            places = self._of_rank(split_batch(range(size), self.sizes.accumulate, self.sizes.ranks))
            cuts = self._cuts[size, self.rank] = [
                (slice(part[0], part[-1] + 1) if part else slice(0), of_ranks) for part, of_ranks in places
            ]
        return [(batch[cut], of_ranks) for cut, of_ranks in cuts]

    def _of_rank(self, cuts: Sequence[Sequence[_Part]]) -> list[tuple[_Part, Sequence[int]]]:
        """Return what is this rank's of [microbatch][rank], and the sizes of each microbatch's parts."""
        parts: list[tuple[_Part, Sequence[int]]] = []
        for micro in cuts:
            sizes = [len(part) for part in micro]
            parts += [(part, sizes) for part in (micro if self.rank is None else [micro[self.rank]])]
        return parts

    def _plan(self, part: Sequence[int], of_ranks: Sequence[int], epoch: int, batch: Sequence[int]) -> MicrobatchPlan:
        """Return the plan of a part of a global batch; of an empty one, a real sample that does not count."""
        if self.lengths is None:
            keys = [(epoch, i) for i in part or batch[:1]]
            return MicrobatchPlan(keys, len(part) / len(batch), of_ranks=of_ranks, repeats=self.sampler is not None)
        tokens, total = self.lengths.tokens(part), self.lengths.tokens(batch)
        shortest = min(batch, key=self.lengths.of.__getitem__)
        keys = [(epoch, i) for i in part or [shortest]]
        return MicrobatchPlan(keys, tokens / total, tokens, total, of_ranks, repeats=self.sampler is not None)

    def batches(self, start: int) -> Iterator[list[tuple[Any, MicrobatchPlan]]]:
        """Yield each step's microbatches with their plans, from step `start` on, without end."""
        settings = self.source.settings
        if settings.workers == 0:
            for plans in self.plans(start):
                yield [(self.read(plan.keys), plan) for plan in plans]
            return
        dataloader: DataLoader[Any] = DataLoader(
            self._dataset,
            batch_sampler=_PlannedKeys(self, start),  # pyright: ignore[reportArgumentType] - keys, not ints
            collate_fn=self.source.collate,
            num_workers=settings.workers,
            pin_memory=self.pin,
            **with_worker_start(self.source.loader_arguments),
        )
        ready = iter(dataloader)
        for plans in self.plans(start):
            yield [(next(ready), plan) for plan in plans]

    def samples(self, step: int) -> int:
        """Return the size of the global batch of the next step, when `step` steps are done."""
        return self.order.size(step)

    def units(self, keys: Sequence[SampleKey]) -> int:
        """Return how many units these samples count for, where the task has no weight of its own."""
        return len(keys) if self.lengths is None else self.lengths.tokens([i for _, i in keys])

    def read(self, keys: list[SampleKey]) -> Any:
        """Return the batch that collate makes of these samples."""
        return self.source.collate(self._dataset.__getitems__(keys))

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

    def __init__(self, loader: MicrobatchLoader, start: int) -> None:
        self.loader, self.start = loader, start

    def __iter__(self) -> Iterator[list[SampleKey]]:
        for plans in self.loader.plans(self.start):
            for plan in plans:
                yield plan.keys
