"""One epoch of a stream: each rank picks its samples from the whole stream, or reads only its own part."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
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
from unipar.errors import TaskError
from unipar.utils.seeding import mix_seed, seed_all

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


@final
class WholeStream(IterableDataset[StreamBatch]):
    """One epoch that each rank and each of its workers reads as a whole; workers take turns with batches."""

    def __init__(
        self,
        source: DataSource,
        sizes: BatchSizes,
        rank: int,
        seed: int,
        *,
        ragged: str = "weigh",
        most: int | None = None,
    ) -> None:
        self.source, self.seed, self.total, self.ragged, self.most = source, seed, sizes.total, ragged, most
        """`most` is the number of samples to read; None for all."""

        parts = split_batch(range(sizes.total), sizes.accumulate, sizes.ranks)
        self.mine = [part[rank] for part in parts]
        self.micro_of = {place: m for m, places in enumerate(self.mine) for place in places}
        self.epoch = self.skip = 0

    @override
    def __iter__(self) -> Iterator[StreamBatch]:
        turn, of = _worker_turn()
        _hide_worker_info()
        samples = islice(seeded_samples(self.source.dataset, self.seed, self.epoch), self.most)
        begun = 0
        first = ""
        for number in count():
            wanted = number >= self.skip and (number - self.skip) % of == turn
            held: list[list[tuple[SampleKey, Any]]] = [[] for _ in self.mine]
            spare: tuple[SampleKey, Any] | None = None
            seen = 0
            for place, sample in enumerate(islice(samples, self.total)):
                seen += 1
                if spare is None:
                    spare = (self.epoch, begun), sample
                    first = digest_sample(sample) if number == 0 and wanted else ""
                if wanted and (m := self.micro_of.get(place)) is not None:
                    held[m].append(((self.epoch, begun + place), sample))
            begun += seen
            if fault := self._fault(begun, ended=seen < self.total):
                yield StreamBatch(number, 0, [], fault=fault)
                return
            if spare is None or (seen < self.total and self.ragged == "drop"):
                return
            if wanted:
                yield StreamBatch(number, seen, [self._micro(one, spare, seen) for one in held], first)

    def _micro(
        self, held: list[tuple[SampleKey, Any]], spare: tuple[SampleKey, Any], seen: int
    ) -> tuple[Any, MicrobatchPlan]:
        keys, samples = zip(*(held or [spare]), strict=True)  # a real sample that does not count
        return self.source.collate(list(samples)), MicrobatchPlan(list(keys), len(held) / seen)

    def _fault(self, begun: int, *, ended: bool) -> str:
        length = self.source.length
        if self.most is None and length is not None and (begun > length or (ended and begun < length)):
            gave = "more than that" if begun > length else str(begun)
            return f"len() of the stream says {length} samples, but epoch {self.epoch + 1} gave {gave}"
        if ended and begun == 0:
            return "data() has no samples" if self.epoch == 0 else EMPTY_EPOCH_SENTENCE.format(self.epoch + 1)
        left = begun % self.total
        if ended and left and self.ragged == "error":
            return (
                f"data.ragged: {begun} samples are {begun // self.total} batches of {self.total} and {left} left over; "
                "choose weigh or drop, or another batch.total"
            )
        if ended and begun < self.total and self.ragged == "drop":
            return f"data.ragged: drop leaves nothing: {begun} samples do not fill one batch of {self.total}"
        return ""


EMPTY_EPOCH_SENTENCE = "the stream gave no samples in epoch {}: its __iter__ must start from the beginning each time"
"""Error for an epoch without samples, with its number to fill in."""


@final
class StreamPart(IterableDataset[tuple[Any, list[SampleKey]]]):
    """One epoch of this rank's part of a stream, as microbatches; each worker reads a part of that part."""

    def __init__(self, source: DataSource, sizes: BatchSizes, rank: int, seed: int) -> None:
        self.source, self.sizes, self.rank, self.seed, self.epoch = source, sizes, rank, seed, 0

    @override
    def __iter__(self) -> Iterator[tuple[Any, list[SampleKey]]]:
        dataset, (turn, workers) = self.source.dataset, _worker_turn()
        part, of = self.rank * workers + turn, self.sizes.ranks * workers
        if self.source.settings.stream == "shards":
            _hide_worker_info()
            dataset = take_shard(dataset, part, of)
        samples = enumerate(seeded_samples(dataset, self.seed, self.epoch, part))
        while chunk := list(islice(samples, self.sizes.micro)):
            keys = [(self.epoch, i * of + part) for i, _ in chunk]
            yield self.source.collate([sample for _, sample in chunk]), keys


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


def seeded_samples(dataset: Any, seed: int, epoch: int, *part: int) -> Iterator[Any]:
    """Yield one pass of a dataset; random numbers depend on seed, epoch and position, not on the reading process."""
    seed_all(mix_seed(seed, 5, epoch, *part), cuda=False)
    if callable(set_epoch := getattr(dataset, "set_epoch", None)):
        set_epoch(epoch)
    ready = iter(dataset)
    for index in count():
        seed_all(mix_seed(seed, 2, epoch, *part, index), cuda=False)
        try:
            sample = next(ready)
        except StopIteration:
            return
        yield sample


def wrap_in_workers(dataset: Any, source: DataSource, *, pin: bool = False) -> Any:
    """Return an iterable over `dataset` that reads in data workers, if the config asks for any."""
    workers = source.settings.workers
    if workers == 0:
        return dataset
    given = with_worker_start(source.loader_arguments)
    return DataLoader(dataset, batch_size=None, collate_fn=_identity, num_workers=workers, pin_memory=pin, **given)


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
