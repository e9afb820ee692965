"""`StreamFeed`: one rank's microbatches of a stream, over all epochs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count, islice
from typing import Any, final

import torch

from unipar.config import BatchSizes
from unipar.data.dataset import DataSource
from unipar.data.order import START, DataPosition, MicrobatchPlan, SampleKey
from unipar.data.stream import (
    EMPTY_EPOCH_SENTENCE,
    StreamBatch,
    StreamPart,
    WholeStream,
    check_shard_method,
    seeded_samples,
    wrap_in_workers,
)
from unipar.distributed.world import World
from unipar.errors import ConfigError, TaskError


@final
class StreamFeed:
    """Microbatches of one rank from a stream, in the order of steps."""

    def __init__(self, source: DataSource, sizes: BatchSizes, world: World, seed: int, *, pin: bool = False) -> None:
        self.source, self.sizes, self.world, self.seed, self.pin = source, sizes, world, seed, pin
        self.whole = source.settings.stream == "whole"
        if source.settings.stream == "shards":
            check_shard_method(source.dataset)
        self._key = world.key("stream")
        self._begin = START
        self._next = (0, 0)
        """Epoch and batch of the step that follows the last one read."""

        self._read = self._samples = 0

    def steps(self, epochs: int) -> int:
        """Return the number of optimizer steps in so many epochs; raise ConfigError if it is unknown."""
        if (per_epoch := self._per_epoch) is None:
            why = "has no len()" if self.whole else f"is read with data.stream: {self.source.settings.stream}"
            raise ConfigError(
                f"train.epochs: data() returned a stream that {why}, so the number of steps in an epoch is unknown; "
                "give train.steps instead"
            )
        return epochs * per_epoch

    @property
    def _per_epoch(self) -> int | None:
        length, total = self.source.length, self.sizes.total
        if not self.whole or length is None:
            return None
        return length // total if self.source.settings.ragged == "drop" else -(-length // total)

    def place(self, step: int) -> tuple[int, int]:
        """Return the epoch and the batch within it of the next step, when `step` steps are done."""
        if self._per_epoch:
            return self._epoch_and_batch(step)
        if step == self._read:
            return self._next
        if not self.whole:
            raise TaskError(
                "the position in a stream that ranks read in parts is known only for the steps that were read"
            )
        return self._epoch_and_batch(step)

    def position(self, step: int) -> DataPosition:
        """Return the place in the data of the next step, when `step` steps are done."""
        epoch, batch = self.place(step)
        return DataPosition(step, epoch, batch * self.sizes.total)

    def go_on_from(self, begin: DataPosition) -> None:
        """Read from this place on, where another run stopped."""
        if begin.sample % self.sizes.total:
            raise TaskError(
                f"batch.total: the run stopped after {begin.sample} samples of epoch {begin.epoch + 1} of a stream, "
                f"which is no multiple of {self.sizes.total}: take the old batch.total back, or one that divides "
                f"{begin.sample}"
            )
        self._begin = begin

    def samples(self, step: int) -> int:
        """Return the size of the global batch of the step read last."""
        return self._samples

    def batch_with_weight(self, weigh: Callable[[Any], float]) -> Any:
        """Return a batch of positive weight, for a rank whose own microbatches have none."""
        for sample in seeded_samples(self.source.dataset, self.seed, 0):
            batch = self.source.collate([sample])
            if weigh(batch) > 0:
                return batch
        raise TaskError("weight(batch) is 0 for every single sample of the data: there is nothing to train on")

    def batches(self, start: int) -> Iterator[list[tuple[Any, MicrobatchPlan]]]:
        """Yield each step's microbatches, from step `start` on, without end; earlier samples are read and skipped."""
        self._read = start
        for portion in self._wholes(start) if self.whole else islice(self._parts(), start, None):
            self._read += 1
            self._samples = portion.samples
            yield portion.micros

    # The same stream on every rank

    def _wholes(self, start: int) -> Iterator[StreamBatch]:
        epoch, skip = self._epoch_and_batch(start)
        while True:
            portion = None
            for portion in self._epoch(epoch, skip):
                if portion.first:
                    self._compare(f"{epoch}/first", portion.first)
                self._next = epoch, portion.number + 1
                yield portion
            if portion is not None:
                self._compare(f"{epoch}/last", f"{portion.number} {portion.samples}")
            epoch, skip = epoch + 1, 0
            self._next = epoch, 0

    def _epoch_and_batch(self, start: int) -> tuple[int, int]:
        """Return the epoch of a step and the batch within it; without len(), by reading and counting."""
        epoch, start = self._begin.epoch, start - self._begin.step + self._begin.sample // self.sizes.total
        if per_epoch := self._per_epoch:
            return divmod(epoch * per_epoch + start, per_epoch)
        if start == self._begin.sample // self.sizes.total:
            return epoch, start
        while start:
            batches = sum(1 for _ in islice(self._counting(epoch), start + 1))
            if batches > start:
                break
            epoch, start = epoch + 1, start - batches
        return epoch, start

    def _counting(self, epoch: int) -> Iterator[StreamBatch]:
        whole = self._whole_stream()
        whole.epoch = epoch
        for portion in whole:
            if portion.fault:
                raise TaskError(portion.fault)
            yield portion

    def _whole_stream(self) -> WholeStream:
        return WholeStream(self.source, self.sizes, self.world.share, self.seed, ragged=self.source.settings.ragged)

    def _epoch(self, epoch: int, skip: int) -> Iterator[StreamBatch]:
        whole = self._whole_stream()
        whole.epoch, whole.skip = epoch, skip
        for portion in wrap_in_workers(whole, self.source, pin=self.pin):
            if portion.fault:
                raise TaskError(portion.fault)
            yield portion

    def _compare(self, what: str, mine: str) -> None:
        """Raise if a rank that has reached the same place has read different samples."""
        self.world.agree_so_far(
            f"{self._key}/{what}",
            mine,
            lambda rank: (
                f"the stream is not the same on ranks {rank} and {self.world.rank}, and data.stream: whole takes each "
                "rank's samples from one stream; if it splits itself by rank, set data.stream: own"
            ),
        )

    # Each rank reads its own part

    def _parts(self) -> Iterator[StreamBatch]:
        part = StreamPart(self.source, self.sizes, self.world.share, self.seed)
        spare: tuple[Any, list[SampleKey]] | None = None
        for epoch in count():
            part.epoch = epoch
            ready = iter(wrap_in_workers(part, self.source, pin=self.pin))
            read = 0
            for number in count():
                held = list(islice(ready, self.sizes.accumulate))
                mine = sum(len(keys) for _, keys in held)
                samples, short = self._sum_over_ranks(mine)
                if short and self.source.settings.ragged == "error":
                    raise TaskError(
                        f"data.ragged: the ranks' parts of epoch {epoch + 1} end at different steps, or within a batch "
                        f"(batch {number + 1} has {samples} of {self.sizes.total} samples); choose weigh or drop"
                    )
                if samples == 0 or (short and self.source.settings.ragged == "drop"):
                    break
                spare = held[-1] if held else spare
                self._next = epoch, number + 1
                read += samples
                yield StreamBatch(number, samples, self._micros(held, spare, samples))
            self._check_epoch(epoch, read)
            self._next = epoch + 1, 0

    def _sum_over_ranks(self, mine: int) -> tuple[int, bool]:
        """Return the size of the global batch, and whether any rank has less than its share; a collective."""
        full = self.sizes.micro * self.sizes.accumulate
        counts = torch.tensor([mine, mine < full], dtype=torch.float64, device=self.world.device)
        samples, short = self.world.sum_shares(counts).tolist()
        return int(samples), short > 0

    def _micros(
        self, held: Sequence[tuple[Any, list[SampleKey]]], spare: tuple[Any, list[SampleKey]] | None, samples: int
    ) -> list[tuple[Any, MicrobatchPlan]]:
        """Return this rank's microbatches, filled up with some of weight 0 so that all ranks run equally many."""
        own = [(batch, MicrobatchPlan(keys, len(keys) / samples)) for batch, keys in held]
        if spare is None:
            raise TaskError(
                f"rank {self.world.rank}'s part of the stream has no samples at all: use fewer ranks or workers"
            )
        return own + [(spare[0], MicrobatchPlan(spare[1], 0.0))] * (self.sizes.accumulate - len(own))

    def _check_epoch(self, epoch: int, read: int) -> None:
        """Raise if the epoch had no samples, or if shards, where they can be counted, did not give each once."""
        settings, length = self.source.settings, self.source.length
        if read == 0:
            raise TaskError(
                EMPTY_EPOCH_SENTENCE.format(epoch + 1)
                if epoch
                else "data.ragged: drop leaves nothing: no batch has all its samples"
                if settings.ragged == "drop"
                else "data() has no samples"
            )
        if settings.stream == "shards" and settings.ragged == "weigh" and length is not None and read != length:
            raise TaskError(
                f"len() of the stream says {length} samples, but its {self.sizes.ranks * max(1, settings.workers)} "
                f"shards gave {read} in epoch {epoch + 1}: shard(index, count) must give each sample to one of them"
            )
