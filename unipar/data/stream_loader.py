"""`StreamLoader`: one rank's microbatches of a stream, over all epochs."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Any, final

import torch

from unipar.config import BatchSizes
from unipar.data.dataset import DataSource
from unipar.data.order import START, DataPosition, MicrobatchPlan, SampleKey
from unipar.data.stream import (
    EMPTY_EPOCH_SENTENCE,
    PartBatch,
    StreamBatch,
    StreamPart,
    WholeStream,
    check_shard_method,
    wrap_in_workers,
)
from unipar.data.stream_reader import ReadingOn, ReadPart, has_state, seeded_samples
from unipar.distributed.world import World
from unipar.errors import ConfigError, TaskError


@dataclass(frozen=True)
class StreamPlace:
    """Place of one seat in a stream, between two steps."""

    epoch: int
    sample: int
    """Samples of the epoch that all seats together were trained on."""

    parts: Sequence[ReadPart] = field(default_factory=lambda: [ReadPart()])
    """Position in the whole stream, or in each data worker's part of this seat's."""

    turn: int = 0
    """Number of the part that gives the next microbatch."""


@final
class StreamLoader:
    """Microbatches of one rank from a stream, in the order of steps."""

    def __init__(
        self,
        source: DataSource,
        sizes: BatchSizes,
        world: World,
        seed: int,
        *,
        pin: bool = False,
        gives_places: bool = False,
        reading_on: Callable[[ReadingOn], None] = lambda item: None,
    ) -> None:
        """`gives_places`: whether `stream_place` is asked for; `reading_on` is called while samples are read past."""
        self.source, self.sizes, self.world, self.seed, self.pin = source, sizes, world, seed, pin
        self.whole = source.settings.stream == "whole"
        self.workers = max(1, source.settings.workers)
        self.parts = 1 if self.whole else self.workers
        """Number of parts that this seat reads one after another."""

        self._gives_places, self._reading_on = gives_places, reading_on
        if source.settings.stream == "shards":
            check_shard_method(source.dataset)
        self._key = world.key("stream")
        self._begin = START
        self._place: StreamPlace | None = None
        """Place that is put back or read on to, with the first step; None for the beginning of an epoch."""

        self._reads_on = False
        self._next = (0, 0)
        """Epoch, and number of its samples read, of the step that follows the last one read."""

        self._places: list[bytes | ReadPart] = []
        self._live: WholeStream | StreamPart | None = None
        self._turn = 0
        self._spoiled = ""
        self._read = self._samples = 0

    def steps(self, epochs: int) -> int:
        """Return the number of optimizer steps in this many epochs; raise ConfigError if it is unknown."""
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
        return length // total if self.source.settings.last_batch == "drop" else -(-length // total)

    def place(self, step: int) -> tuple[int, int]:
        """Return the epoch and the batch within it of the next step, when `step` steps are done."""
        _, epoch, sample = self.position(step)
        return epoch, sample // self.sizes.total

    def position(self, step: int) -> DataPosition:
        """Return the place in the data of the next step, when `step` steps are done."""
        if self._per_epoch:
            return DataPosition(step, *self._epoch_and_sample(step))
        if step == self._read:
            return DataPosition(step, *self._next)
        if not self.whole:
            raise TaskError(
                "the position in a stream that ranks read in parts is known only for the steps that were read"
            )
        return DataPosition(step, *self._epoch_and_sample(step))

    def go_on_from(self, begin: DataPosition, place: StreamPlace | None = None, *, reads_on: bool = False) -> None:
        """Read from this place on, where another run stopped, perhaps with batches of another size.

        `place`: this seat's; without it samples of the whole stream are read past. `reads_on`: whether any seat reads
        past samples, and this one waits for it.
        """
        if place is None and self.whole and begin.sample:
            place = StreamPlace(begin.epoch, begin.sample, [ReadPart(begin.sample)])
        self._begin, self._place, self._reads_on = begin, place, reads_on
        self._read, self._next = begin.step, begin[1:] if place is None else (place.epoch, place.sample)

    def stream_place(self) -> StreamPlace:
        """Return this seat's place behind the step that was read last, with the stream's states there."""
        if self._live is None:
            return self._place or StreamPlace(*self._next, [ReadPart()] * self.parts)
        if self.source.settings.workers == 0 and self._live.reader is not None:
            parts = [self._live.reader.place()]
        else:
            parts = [pickle.loads(one) if isinstance(one, bytes) else one for one in self._places]
        if self._spoiled:
            parts = [part._replace(state=None, why=self._spoiled) for part in parts]
        return StreamPlace(*self._next, parts, self._turn)

    def samples(self, step: int) -> int:
        """Return the size of the global batch of the step read last."""
        return self._samples

    def batch_with_weight(self, weigh: Callable[[Any], float]) -> Any:
        """Return a batch of positive weight, for a rank whose own microbatches have none."""
        for sample in self._samples_apart():
            batch = self.source.collate([sample])
            if weigh(batch) > 0:
                return batch
        raise TaskError("weight(batch) is 0 for every single sample of the data: there is nothing to train on")

    def batches(self, start: int) -> Iterator[list[tuple[Any, MicrobatchPlan]]]:
        """Yield each step's microbatches, from step `start` on, without end; earlier samples are read and skipped."""
        self._read = start
        for portion in self._wholes(start) if self.whole else islice(self._parts(), start - self._begin.step, None):
            self._read += 1
            self._samples = portion.samples
            yield portion.micros

    # The same stream on every rank

    def _wholes(self, start: int) -> Iterator[StreamBatch]:
        if self._place is not None and start == self._begin.step:
            epoch, sample, begin = self._place.epoch, self._place.sample, self._place.parts[0]
        else:
            epoch, sample = self._epoch_and_sample(start)
            begin = ReadPart(sample)
        while True:
            portion = None
            self._places = [begin]
            for portion in self._epoch(epoch, begin):
                if portion.first:
                    self._compare(f"{epoch}/{begin.read}", portion.first)
                sample += portion.samples
                self._next, self._places = (epoch, sample), [portion.place or ReadPart(sample)]
                yield portion
            if portion is not None:
                self._compare(f"{epoch}/last", str(sample))
            epoch, sample, begin = epoch + 1, 0, ReadPart()
            self._next = epoch, 0

    def _epoch_and_sample(self, start: int) -> tuple[int, int]:
        """Return the epoch of a step, and how many of its samples come before; without len(), by reading."""
        done, total = start - self._begin.step, self.sizes.total
        _, epoch, sample = self._begin
        if per_epoch := self._per_epoch:
            left = (self.source.length or 0) - sample
            first = left // total if self.source.settings.last_batch == "drop" else -(-left // total)
            if done < first:
                return epoch, sample + done * total
            epochs, batches = divmod(done - first, per_epoch)
            return epoch + 1 + epochs, batches * total
        while done:
            batches = sum(1 for _ in islice(self._counting(epoch, sample), done + 1))
            if batches > done:
                break
            epoch, sample, done = epoch + 1, 0, done - batches
        return epoch, sample + done * total

    def _counting(self, epoch: int, sample: int) -> Iterator[StreamBatch]:
        stream = self._whole_stream(epoch, ReadPart(sample))
        for portion in stream:
            if isinstance(portion, ReadingOn):
                continue
            if portion.fault:
                raise TaskError(portion.fault)
            yield portion

    def _whole_stream(self, epoch: int, begin: ReadPart) -> WholeStream:
        share, last_batch = self.world.data_rank, self.source.settings.last_batch
        stream = WholeStream(self.source, self.sizes, share, self.seed, last_batch=last_batch)
        stream.epoch, stream.begin = epoch, begin
        stream.gives_places = self._gives_places and self.world.rank == 0  # they are the same on all ranks
        return stream

    def _epoch(self, epoch: int, begin: ReadPart) -> Iterator[StreamBatch]:
        stream = self._live = self._whole_stream(epoch, begin)
        for portion in wrap_in_workers(stream, self.source, pin=self.pin):
            if isinstance(portion, ReadingOn):
                self._reading_on(portion)
                continue
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
        part = self._live = StreamPart(self.source, self.sizes, self.world.data_rank, self.seed)
        part.gives_places = self._gives_places and self.world.leads
        spare: tuple[Any, list[SampleKey]] | None = None
        first, read = self._begin.epoch, 0
        if (place := self._place) is not None:
            first, read = place.epoch, place.sample
            part.begin, part.turn, part.reads_on = place.parts, place.turn, self._reads_on
        for epoch in count(first):
            part.epoch = epoch
            self._places = list(part.begin) or [ReadPart()] * self.parts
            self._turn = part.turn
            ready = self._own_microbatches(wrap_in_workers(part, self.source, pin=self.pin))
            for number in count():
                held = list(islice(ready, self.sizes.accumulate))
                mine = sum(len(keys) for _, keys in held)
                samples, short = self._sum_over_ranks(mine)
                if short and self.source.settings.last_batch == "error":
                    raise TaskError(
                        f"data.last_batch: the ranks' parts of epoch {epoch + 1} end at different steps, or within a "
                        f"batch (batch {number + 1} has {samples} of {self.sizes.total} samples); choose keep or drop"
                    )
                if samples == 0 or (short and self.source.settings.last_batch == "drop"):
                    break
                spare = held[-1] if held else spare or self._any_sample(epoch)
                read += samples
                self._next = epoch, read
                yield StreamBatch(number, samples, self._micros(held, spare, samples))
            self._check_epoch(epoch, read)
            read, part.begin, part.turn, part.reads_on = 0, (), 0, False
            self._next = epoch + 1, 0

    def _own_microbatches(self, items: Any) -> Iterator[tuple[Any, list[SampleKey]]]:
        """Yield this rank's microbatches of an epoch, and keep the place behind the last one that was taken."""
        for item in items:
            if isinstance(item, ReadingOn):
                self._reading_on(item)
                continue
            one: PartBatch = item
            if one.fault:
                raise TaskError(one.fault)
            self._places[one.turn] = one.place or ReadPart(one.read)
            self._turn = (one.turn + 1) % self.parts
            yield one.batch, one.keys

    def _any_sample(self, epoch: int) -> tuple[Any, list[SampleKey]] | None:
        """Return a sample for a rank whose part has ended before this run went on; it does not count."""
        if self._place is None:
            return None
        for sample in self._samples_apart():
            return self.source.collate([sample]), [(epoch, 0)]
        return None

    def _samples_apart(self) -> Iterator[Any]:
        """Return a pass over the stream that leaves the place of the training's own pass, if there is a way."""
        dataset = self.source.dataset
        if self.source.settings.workers == 0 and has_state(dataset):
            try:
                dataset = deepcopy(dataset)
            except Exception as e:  # of the user's classes
                self._spoiled = (
                    f"its samples were read once more, for a microbatch that does not count, and it cannot be copied "
                    f"for that ({type(e).__name__}: {e})"
                )
        return seeded_samples(dataset, self.seed, 0 if self._place is None else self._place.epoch + 1)

    def _sum_over_ranks(self, mine: int) -> tuple[int, bool]:
        """Return the size of the global batch, and whether any rank has less than its share; a collective."""
        full = self.sizes.micro * self.sizes.accumulate
        counts = torch.tensor([mine, mine < full], dtype=torch.float64)
        samples, short = self.world.sum_over_data_on_host(counts).tolist()
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
                else "data.last_batch: drop leaves nothing: no batch has all its samples"
                if settings.last_batch == "drop"
                else "data() has no samples"
            )
        if settings.stream == "shards" and settings.last_batch == "keep" and length is not None and read != length:
            raise TaskError(
                f"len() of the stream says {length} samples, but its {self.sizes.ranks * self.workers} "
                f"shards gave {read} in epoch {epoch + 1}: shard(index, count) must give each sample to one of them"
            )
