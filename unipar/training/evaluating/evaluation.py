"""Evaluation: means of a task's metrics over its validation data, summed over batches and ranks."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from unipar.backend import Engine, Mark
from unipar.config import BatchSizes, Config
from unipar.data.data_worker import with_worker_start
from unipar.data.dataset import SeededDataset, data_source_of
from unipar.data.lengths import SampleLengths, measure_lengths
from unipar.data.order import SampleKey
from unipar.data.stream import WholeStream, wrap_in_workers
from unipar.data.token_order import consecutive_microbatches
from unipar.distributed.world import World
from unipar.engines.batch import to_device
from unipar.errors import ConfigError, TaskError
from unipar.task import Task
from unipar.utils.seeding import mix_seed, seed_all

_NO_SAMPLES = "validation() has no samples"


def refuse_unsynced_evaluation(done: int, every: int) -> None:
    """Raise TaskError if ranks that step independently (`train.sync_every`) have different models after step `done`."""
    if done % every:
        raise TaskError(
            f"evaluate() was called after step {done}: with train.sync_every: {every} ranks have the same model only "
            f"after every {every} steps and after the last one; evaluate then"
        )


@final
class Evaluation:
    """Evaluation on one rank: the same samples in a world of any size, and equally many batches on every rank."""

    def __init__(
        self,
        task: Task,
        engines: Sequence[Engine],
        world: World,
        config: Config,
        sizes: BatchSizes,
        mark: Mark,
    ) -> None:
        self.mark = mark
        self.task, self.engines, self.world, self.sizes = task, engines, world, sizes
        self.engine = engines[0]
        """Engine of the part that is evaluated."""

        self.seed, self.device = config.train.seed, world.device
        data = task.validation()
        if data is None:
            raise TaskError("there is nothing to evaluate: give the task validation(), a dataset, or leave eval out")
        collate = task.collate if task.defines("collate") else None
        self.source = data_source_of(data, collate, task.collate, config, sizes)
        self.most = config.eval.batches * sizes.total if config.eval.batches is not None else None
        """Samples, or tokens, that are read; None: all."""

        if self.source.sampler is not None:
            raise TaskError(
                f"validation() returned a DataLoader with a sampler of its own ({type(self.source.sampler).__name__}); "
                "an evaluation reads every sample once: leave it out"
            )
        self._lengths: SampleLengths | None = None
        if self.source.streams:
            if sizes.tokens is not None:
                raise ConfigError(
                    f"batch.tokens: {sizes.total}: validation() returned a stream, and batches of tokens are planned "
                    "by the length of every sample: return a map-style dataset, or give batch.total"
                )
            return
        if len(self.source) == 0:
            raise TaskError(_NO_SAMPLES)
        share, given = (world.rank, world.size), (task, self.source.dataset, self.seed, sizes)

        def add_up(lengths: Tensor) -> Tensor:
            return world.sum(lengths.to(world.device)).cpu()

        def report(done: int, of: int) -> None:
            mark("evaluate")

        self._lengths = measure_lengths(*given, of="validation()", share=share, add_up=add_up, report=report)
        self.sums: dict[str, list[float]] = {}

    def __call__(self) -> dict[str, float]:
        """Return the mean of each metric; every rank calls it."""
        for engine in self.engines:
            engine.share_buffers()
        self.sums = {}
        for i, (batch, samples) in enumerate(
            self._stream_batches() if self.source.streams else self._map_style_batches()
        ):
            self.mark("evaluate")  # one mark a batch: the watchdog sees that the rank does not hang
            seed_all(mix_seed(self.seed, 4, self.world.share + i * self.world.shares))
            metrics = self.engine.evaluate(self._metrics, to_device(batch, self.device))
            self._add(metrics, self._weight(batch, samples) if samples else None)
        return self._means()

    def _map_style_batches(self) -> Iterator[tuple[Any, int]]:
        """Yield this rank's batches and their numbers of samples, or of tokens.

        Number 0 marks a batch that is run and not added: other ranks still have one, and collectives need every rank.
        """
        size, rank = self.world.shares, self.world.share
        chunks = self._chunks()
        rounds = -(-len(chunks) // size)
        mine = [chunks[i] if i < len(chunks) else chunks[0] for i in range(rank, rounds * size, size)]
        loader: DataLoader[Any] = DataLoader(
            SeededDataset(self.source.dataset, self.seed),
            batch_sampler=mine,  # pyright: ignore[reportArgumentType] - keys, not ints
            collate_fn=self.source.collate,
            num_workers=self.source.settings.workers,
            **with_worker_start(self.source.loader_arguments),
        )
        for i, batch in enumerate(loader):
            yield batch, self._units(mine[i]) if rank + i * size < len(chunks) else 0

    def _chunks(self) -> list[list[SampleKey]]:
        """Return the samples of each batch, in the order of the data."""
        most, micro = self.most, self.sizes.micro
        if self._lengths is None:
            samples = range(len(self.source))[:most]
            parts = (samples[i : i + micro] for i in range(0, len(samples), micro))
        else:
            assert self.sizes.tokens is not None
            lengths = self._lengths.of
            if most is not None:
                lengths = lengths[: bisect_right(list(accumulate(lengths)), most)]
            parts = consecutive_microbatches(lengths, micro, packed=self.sizes.tokens.packed)
        return [[(0, i) for i in part] for part in parts]

    def _units(self, keys: Sequence[SampleKey]) -> int:
        """Return how many units these samples count for, where the task has no weight of its own."""
        return len(keys) if self._lengths is None else self._lengths.tokens([i for _, i in keys])

    def _stream_batches(self) -> Iterator[tuple[Any, int]]:
        """Yield this rank's batches of a stream, which every rank reads as a whole, and their numbers of samples."""
        size, micro = self.world.shares, self.sizes.micro
        rounds = BatchSizes(total=micro * size, micro=micro, accumulate=1, ranks=size)
        for portion in wrap_in_workers(
            WholeStream(self.source, rounds, self.world.share, self.seed, most=self.most), self.source
        ):
            if portion.fault:
                raise TaskError(portion.fault.replace("data()", "validation()"))
            ((batch, plan),) = portion.micros
            yield batch, len(plan.keys) if plan.weight else 0

    def _metrics(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        return self.task.metrics(model, batch)

    def _weight(self, batch: Any, units: int) -> float:
        weight = self.task.weight(batch)
        return float(units if weight is None else weight)

    def _add(self, metrics: Any, weight: float | None) -> None:
        if not isinstance(metrics, Mapping):
            raise TaskError(
                f"metrics() returned {metrics!r}; return a mapping of names to means or to pairs (mean, weight)"
            )
        for name, value in metrics.items():
            pair: tuple[Any, Any] = value if isinstance(value, tuple) else (value, weight)
            mean, own = pair
            total = self.sums.setdefault(str(name), [0.0, 0.0])
            if weight is None or not float(own):
                continue
            if isinstance(mean, Tensor) and mean.numel() != 1:
                raise TaskError(f"metrics()[{name!r}] has the shape {tuple(mean.shape)}; return one number")
            total[0] += float(mean) * float(own)
            total[1] += float(own)

    def _agree(self, names: list[str]) -> None:
        """Raise TaskError if ranks have different metrics: sums of different names would be added to one another."""
        mine, rank = ", ".join(names), self.world.rank
        self.world.agree(
            "metrics",
            mine,
            lambda first: (
                f"metrics() gave {mine or 'nothing'} on rank {rank} and {first or 'nothing'} on rank 0: "
                "the names must not depend on the batch"
            ),
        )

    def _means(self) -> dict[str, float]:
        names = sorted(self.sums)
        self._agree(names)
        rows = torch.tensor([self.sums[n] for n in names], dtype=torch.float64, device=self.device)
        if names:
            self.world.sum(rows)
        pairs = zip(names, rows.tolist(), strict=True)
        return {name: total / weight if weight else float("nan") for name, (total, weight) in pairs}
