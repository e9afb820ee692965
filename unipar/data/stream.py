"""One epoch of a stream: each rank picks its samples from the whole stream, or reads only its own part."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from inspect import signature
from itertools import count, islice
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data._utils import worker as _worker
from typing_extensions import override

from unipar.config import BatchSizes
from unipar.data.data_worker import with_worker_start
from unipar.data.dataset import DataSource
from unipar.data.order import MicrobatchPlan, SampleKey, split_batch
from unipar.data.stream_reader import ReadingOn, ReadPart, StreamReader
from unipar.errors import TaskError

STREAM_PROMISES = {
    "whole": "every rank and worker reads the whole stream and keeps its own samples: each sample counts once, and "
    "batches are the same for any number of ranks",
    "shards": "each rank and worker reads its own shard; which samples share a batch depends on the number of ranks "
    "and workers",
    "own": "the stream splits itself by rank and worker; unipar cannot check that each sample is read once",
}
"""Guarantees of each value of `data.stream`, in words."""


class StreamBatch(NamedTuple):
    """One rank's microbatches of one global batch."""

    number: int
    """Number of the batch within its epoch, from 0."""

    samples: int
    """Number of samples in the global batch."""

    micros: list[tuple[Any, MicrobatchPlan]]
    first: str = ""
    """Digest of the epoch's first sample; only set in its first batch."""

    fault: str = ""
    """Error in the stream, as a sentence: an exception raised in a data worker would lose its message."""

    place: bytes = b""
    """Place of a data worker in the stream behind this batch (`StreamReader.packed_place`), if it was asked for."""


class PartBatch(NamedTuple):
    """Microbatch of a rank that reads its own part of a stream."""

    batch: Any
    keys: list[SampleKey]
    turn: int
    """Number of the data worker's part within the rank's."""

    read: int
    """Samples of this part that were read so far in this epoch."""

    place: bytes = b""
    """Place of a data worker in its part behind this microbatch, if it was asked for."""

    fault: str = ""
    """Error in the stream, as a sentence."""


@final
class WholeStream(IterableDataset[StreamBatch | ReadingOn]):
    """One epoch that each rank and each of its workers reads as a whole; workers take turns with batches."""

    def __init__(
        self,
        source: DataSource,
        sizes: BatchSizes,
        rank: int,
        seed: int,
        *,
        last_batch: str = "keep",
        most: int | None = None,
    ) -> None:
        self.source, self.seed, self.total, self.last_batch, self.most = source, seed, sizes.total, last_batch, most
        """`most` is the number of samples to read; None for all."""

        self.parts = split_batch(range(sizes.total), sizes.accumulate, sizes.ranks)
        """Places in a full global batch, by microbatch and rank."""

        self.mine = [of_ranks[rank] for of_ranks in self.parts]
        self.micro_of = {place: m for m, places in enumerate(self.mine) for place in places}
        self.epoch, self.begin = 0, ReadPart()
        """Epoch, and where it is begun: batches are counted from there."""

        self.gives_places = False
        """Whether data workers give the place behind each batch."""

        self.reader: StreamReader | None = None
        """Reader of this process, once it has begun."""

    @override
    def __iter__(self) -> Iterator[StreamBatch | ReadingOn]:
        turn, of = _worker_turn()
        in_worker = get_worker_info() is not None
        _hide_worker_info()
        self.reader = reader = StreamReader(self.source.dataset, self.seed, self.epoch, (), self.begin)
        if reader.ended:
            return
        if self.begin.read > reader.read:
            yield from reader.read_on()
        if reader.too_short:
            text = _TOO_SHORT.format("the stream", reader.read, self.epoch + 1, self.begin.read)
            yield StreamBatch(0, 0, [], fault=text)
            return
        samples = islice(reader, None if self.most is None else self.most - reader.read)
        begun = reader.read
        first = ""
        for number in count():
            wanted = number % of == turn
            held: list[list[tuple[SampleKey, Any]]] = [[] for _ in self.mine]
            spare: tuple[SampleKey, Any] | None = None
            read = 0
            for place, sample in enumerate(islice(samples, self.total)):
                read += 1
                if spare is None:
                    spare = (self.epoch, begun), sample
                    first = digest_sample(sample) if number == 0 and wanted else ""
                if wanted and (m := self.micro_of.get(place)) is not None:
                    held[m].append(((self.epoch, begun + place), sample))
            begun += read
            if fault := self._fault(begun, ended=read < self.total):
                yield StreamBatch(number, 0, [], fault=fault)
                return
            if spare is None or (read < self.total and self.last_batch == "drop"):
                return
            if wanted:
                place = reader.packed_place() if in_worker and self.gives_places else b""
                yield StreamBatch(
                    number,
                    read,
                    [self._micro(one, spare, read, parts) for one, parts in zip(held, self.parts, strict=True)],
                    first,
                    place=place,
                )

    def _micro(
        self,
        held: list[tuple[SampleKey, Any]],
        spare: tuple[SampleKey, Any],
        first: int,
        parts: Sequence[Sequence[int]],
    ) -> tuple[Any, MicrobatchPlan]:
        of_ranks = [sum(place < first for place in part) for part in parts]
        keys, samples = zip(*(held or [spare]), strict=True)  # a real sample that does not count
        return self.source.collate(list(samples)), MicrobatchPlan(list(keys), len(held) / first, of_ranks=of_ranks)

    def _fault(self, begun: int, *, ended: bool) -> str:
        length = self.source.length
        if self.most is None and length is not None and (begun > length or (ended and begun < length)):
            gave = "more than that" if begun > length else str(begun)
            return f"len() of the stream says {length} samples, but epoch {self.epoch + 1} gave {gave}"
        if ended and begun == 0:
            return "data() has no samples" if self.epoch == 0 else EMPTY_EPOCH_SENTENCE.format(self.epoch + 1)
        left = begun % self.total
        if ended and left and self.last_batch == "error":
            return (
                f"data.last_batch: {begun} samples are {begun // self.total} batches of {self.total} and {left} left "
                "over; choose keep or drop, or another batch.total"
            )
        if ended and begun < self.total and self.last_batch == "drop":
            return f"data.last_batch: drop leaves nothing: {begun} samples do not fill one batch of {self.total}"
        return ""


_TOO_SHORT = (
    "{} ended after {} samples of epoch {}, and the checkpoint was saved after {} of them: it is another stream"
)

EMPTY_EPOCH_SENTENCE = "the stream gave no samples in epoch {}: its __iter__ must start from the beginning each time"
"""Error for an epoch without samples, with its number to fill in."""


@final
class StreamPart(IterableDataset[PartBatch | ReadingOn]):
    """One epoch of this rank's part of a stream, as microbatches; each worker reads a part of that part."""

    def __init__(self, source: DataSource, sizes: BatchSizes, rank: int, seed: int) -> None:
        self.source, self.sizes, self.rank, self.seed, self.epoch = source, sizes, rank, seed, 0
        self.begin: Sequence[ReadPart] = ()
        """Position in this epoch of each worker's part; () to begin it."""

        self.turn = 0
        """Number of the part whose turn it is first."""

        self.reads_on = False
        """Whether a part of any rank is read on to its place."""

        self.gives_places = False
        self.reader: StreamReader | None = None

    @override
    def __iter__(self) -> Iterator[PartBatch | ReadingOn]:
        worker, workers = _worker_turn()
        in_worker = get_worker_info() is not None
        turn = (worker + self.turn) % workers
        part, of = self.rank * workers + turn, self.sizes.ranks * workers
        dataset = self.source.dataset
        if self.source.settings.stream == "shards":
            _hide_worker_info()
            dataset = take_shard(dataset, part, of)
        elif turn != worker:
            _change_worker_id(turn)
        begin = self.begin[turn] if self.begin else ReadPart()
        self.reader = reader = StreamReader(dataset, self.seed, self.epoch, (part,), begin)
        if self.reads_on:
            yield from reader.read_on()
        if reader.too_short:
            text = _TOO_SHORT.format(f"part {part + 1} of the stream", reader.read, self.epoch + 1, begin.read)
            yield PartBatch(None, [], turn, reader.read, fault=text)
            return
        while True:
            first = reader.read
            if not (chunk := list(islice(reader, self.sizes.micro))):
                return
            keys = [(self.epoch, i * of + part) for i in range(first, reader.read)]
            place = reader.packed_place() if in_worker and self.gives_places else b""
            yield PartBatch(self.source.collate(chunk), keys, turn, reader.read, place)


def take_shard(dataset: Any, index: int, of: int) -> Any:
    """Return part `index` of `of` parts; Hugging Face's datasets call the argument `num_shards` instead of `count`."""
    named = signature(dataset.shard).parameters
    return dataset.shard(index=index, **{"count" if "count" in named else "num_shards": of})


def check_shard_method(dataset: Any) -> None:
    """Raise TaskError unless the dataset has a method shard(index, count) or shard(index, num_shards)."""
    method = getattr(dataset, "shard", None)
    named = set(signature(method).parameters) if callable(method) else set[str]()
    if "index" not in named or not named & {"count", "num_shards"}:
        raise TaskError(
            f"data.stream: shards: {type(dataset).__name__} has no method shard(index, count) that returns a part of "
            "it; write one, set data.stream: own if it splits itself by rank and worker, or leave the key out"
        )


def _worker_turn() -> tuple[int, int]:
    """Return the number of this data worker and how many there are."""
    info = get_worker_info()
    return (0, 1) if info is None else (info.id, info.num_workers)


def _hide_worker_info() -> None:
    """Make get_worker_info() return None, so that the dataset does not split itself among workers as well."""
    _worker._worker_info = None  # pyright: ignore[reportPrivateUsage]


def _change_worker_id(turn: int) -> None:
    """Make get_worker_info() return another number, for a dataset that splits itself among workers."""
    info: Any = get_worker_info()
    changed = _worker.WorkerInfo(id=turn, num_workers=info.num_workers, seed=info.seed, dataset=info.dataset)
    _worker._worker_info = changed  # pyright: ignore[reportPrivateUsage]


def wrap_in_workers(dataset: Any, source: DataSource, *, pin: bool = False) -> Any:
    """Return an iterable over `dataset` that reads in data workers, if the config asks for any."""
    workers = source.settings.workers
    if workers == 0:
        return dataset
    arguments = with_worker_start(source.loader_arguments)
    return DataLoader(dataset, batch_size=None, collate_fn=_identity, num_workers=workers, pin_memory=pin, **arguments)


def _identity(portion: Any) -> Any:
    return portion


def digest_sample(sample: Any) -> str:
    """Return a digest of a sample's tensors, numbers and text; other contents are ignored."""
    digest = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, Tensor):
            flat = torch.view_as_real(value) if value.is_complex() else value
            add(flat.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
        elif isinstance(value, np.ndarray):
            digest.update(f"{value.dtype}{value.shape}".encode() + value.tobytes())
        elif isinstance(value, Mapping):
            for key, inner in value.items():
                add((key, inner))
        elif isinstance(value, list | tuple):
            digest.update(b"[")
            for inner in value:
                add(inner)
        elif isinstance(value, str | bytes | int | float | complex | None):
            digest.update(repr(value).encode())

    add(sample)
    return digest.hexdigest()
