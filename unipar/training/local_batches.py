"""Microbatches of a step, each with its weight in the global batch; and the first ones, for trials and scripts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count, islice
from typing import Any, final

import torch

from unipar.backend import Micro
from unipar.config import BatchSizes, Config
from unipar.data.dataset import DataSource, SeededDataset, training_data_source
from unipar.data.lengths import measure_lengths
from unipar.data.microbatch_loader import MicrobatchLoader
from unipar.data.order import MicrobatchPlan, shuffled_indices
from unipar.data.stream_loader import StreamLoader
from unipar.data.token_split import padded_tokens
from unipar.distributed.world import World
from unipar.engines.batch_transfer import to_device
from unipar.errors import TaskError, UniparError
from unipar.task import LocalBatch, Task


@final
class LocalBatchMaker:
    """Maker of this rank's local batches; all ranks make each together."""

    def __init__(self, task: Task, world: World) -> None:
        self._task, self._world = task, world
        self._weighs = task.defines("weight")
        self._batch_with_weight: Any = None

    def make(
        self, read: Sequence[tuple[Any, MicrobatchPlan]], loader: MicrobatchLoader | StreamLoader, done: int
    ) -> LocalBatch:
        """Return the local batch of the step after `done` steps, from microbatches that `loader` has read."""
        samples = loader.samples(done)
        if not self._weighs:
            tokens = float(read[0][1].of_tokens) or None
            return self._on_device([(batch, plan.weight) for batch, plan in read], samples, tokens)
        weights = [self._weight(batch, plan.tokens or len(plan.keys)) if plan.weight else 0.0 for batch, plan in read]
        total = self._world.sum_over_data_on_host(torch.tensor(sum(weights), dtype=torch.float64)).item()
        if not total > 0:
            raise TaskError(
                f"weight(batch) is {total:g} over the global batch of step {done + 1}; it must be above 0 for one "
                "sample"
            )
        self._batch_with_weight = next(
            (b for (b, _), w in zip(read, weights, strict=True) if w > 0), self._batch_with_weight
        )
        if self._batch_with_weight is None and 0.0 in weights:
            self._batch_with_weight = loader.batch_with_weight(self._weight)
        micros = [(b if w > 0 else self._batch_with_weight, w / total) for (b, _), w in zip(read, weights, strict=True)]
        return self._on_device(micros, samples, total)

    def _on_device(self, micros: Sequence[tuple[Any, float]], samples: int, weight: float | None = None) -> LocalBatch:
        """Return a local batch of microbatches, given as batch and scale; every rank's first come before the second."""
        numbered, device = (
            zip(micros, count(self._world.data_rank, self._world.data_size), strict=False),
            self._world.device,
        )
        if device.type != "cpu":
            numbered = (((to_device(batch, device), scale), number) for (batch, scale), number in numbered)
        return LocalBatch([Micro(batch, scale, number) for (batch, scale), number in numbered], samples, weight)

    def _weight(self, batch: Any, samples: int = 1) -> float:
        weight = self._task.weight(batch)
        if weight is not None and not float(weight) >= 0:
            raise TaskError(f"weight(batch) is {float(weight):g}; it must not be negative")
        return float(samples if weight is None else weight)


def first_microbatch(task: Task, config: Config, sizes: BatchSizes) -> Any:
    """Return the first microbatch of data() that counts, read apart from the training's data."""
    try:
        return read_first_microbatch(task, task.data(), config, sizes)
    except UniparError:
        raise
    except Exception as e:
        raise TaskError(
            f"{config.parallel.axes} tries the model on one microbatch of data() before the first step, and data() "
            f"gave none ({type(e).__name__}: {e}): let data() return the dataset that the training loop reads"
        ) from e


def read_first_microbatch(task: Task, data: Any, config: Config, sizes: BatchSizes) -> Any:
    """Return the first microbatch that counts of what data() returned."""
    collate = task.collate if task.defines("collate") else None
    source = training_data_source(data, collate, task.collate, config, sizes)
    if source.streams:
        return source.collate(list(islice(iter(source.dataset), sizes.micro)))
    if sizes.tokens is not None:
        return source.collate(_first_samples(task, source, config, sizes))
    loader = MicrobatchLoader(
        replace(source, sampler=None), sizes, 0, config.train.seed
    )  # a sampler is drawn by the run
    batch = loader.read(next(loader.plans(0))[0].keys)
    weight = task.weight(batch)
    if weight is not None and float(weight) == 0:
        batch = loader.batch_with_weight(lambda b: float(task.weight(b) or 0))
    return batch


def _first_samples(task: Task, source: DataSource, config: Config, sizes: BatchSizes) -> list[Any]:
    """Return as many samples as a microbatch of tokens holds, without the lengths of all others."""
    assert sizes.tokens is not None
    dataset, samples, lengths = SeededDataset(source.dataset, config.train.seed), list[Any](), list[int]()
    for i in shuffled_indices(len(source), config.train.seed, 0, shuffle=source.settings.shuffle):
        sample = dataset[0, i]
        lengths.append(int(task.length(sample)))
        if samples and padded_tokens(range(len(lengths)), lengths, packed=sizes.tokens.packed) > sizes.micro:
            break
        samples.append(sample)
    return samples


def first_microbatches(task: Task, config: Config, sizes: BatchSizes, number: int) -> list[Any]:
    """Return the first microbatches, of all ranks; fewer if the first epoch has fewer."""
    collate = task.collate if task.defines("collate") else None
    source = training_data_source(task.data(), collate, task.collate, config, sizes)
    if source.streams:
        samples = iter(source.dataset)
        read = (list(islice(samples, sizes.micro)) for _ in range(number))
        return [source.collate(each) for each in read if each]
    lengths = measure_lengths(task, source.dataset, config.train.seed, sizes)
    loader = MicrobatchLoader(source, sizes, None, config.train.seed, lengths=lengths)
    steps = islice(loader.plans(0), max(1, loader.order.per_epoch))
    plans = islice((plan for step in steps for plan in step), number)
    return [loader.read(plan.keys) for plan in plans]
