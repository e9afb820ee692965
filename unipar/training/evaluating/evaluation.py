"""Evaluation: a task's metrics over its validation data: means, and what is computed from all batches and ranks."""

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
from unipar.config.config import Eval
from unipar.data.data_worker import with_worker_start
from unipar.data.dataset import SeededDataset, data_source_of
from unipar.data.lengths import SampleLengths, measure_lengths
from unipar.data.order import SampleKey
from unipar.data.stream import WholeStream, wrap_in_workers
from unipar.data.token_order import consecutive_microbatches
from unipar.distributed.world import World
from unipar.engines.batch_transfer import to_device
from unipar.errors import ConfigError, TaskError
from unipar.task import Task
from unipar.training.evaluating.mean_check import differs, names_that_differ, refuse_no_mean, split_in_halves
from unipar.training.evaluating.whole_metrics import WholeKind, WholeMetrics
from unipar.utils.seeding import mix_seed, seed_all
from unipar.utils.text import yaml_word

_NO_SAMPLES = "validation() has no samples"


def refuse_idle_evaluation(task: Task, config: Config) -> None:
    """Raise ConfigError if a key of `eval` has no effect: the default loop evaluates only where eval.every is given."""
    if config.eval.every is not None or task.defines("train"):
        return
    default = Eval()
    for key in ("batches", "check"):
        if (value := getattr(config.eval, key)) != getattr(default, key):
            raise ConfigError(
                f"eval.{key}: {yaml_word(value)} has no effect: nothing is evaluated without eval.every; give it, or "
                "leave eval out"
            )


def refuse_unsynced_evaluation(done: int, every: int, call: str = "evaluate()") -> None:
    """Raise TaskError if ranks with `train.local_steps` have different models after step `done`."""
    if done % every:
        raise TaskError(
            f"{call} was called after step {done}: with train.local_steps: {every} ranks have the same model only "
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
        if not self.source.streams:
            if len(self.source) == 0:
                raise TaskError(_NO_SAMPLES)
            self._lengths = self._measured()
        elif sizes.tokens is not None:
            raise ConfigError(
                f"batch.tokens: {sizes.total}: validation() returned a stream, and batches of tokens are planned "
                "by the length of every sample: return a map-style dataset, or give batch.total"
            )
        self.sums: dict[str, list[float]] = {}
        self.whole = WholeMetrics(world)
        self._kinds: dict[str, WholeKind] = {}
        self._checks = config.eval.check and task.defines("metrics")
        """Whether the next evaluation checks that numbers are means."""

        self._precision = config.train.precision

    def __call__(self) -> dict[str, float]:
        """Return each metric; every rank calls it."""
        for engine in self.engines:
            engine.share_buffers()
        self.sums, self._kinds = {}, {}
        self.whole.begin(getattr(self.task, "__dict__", {}))
        for i, (batch, samples, key) in enumerate(
            self._stream_batches() if self.source.streams else self._map_style_batches()
        ):
            self.mark("evaluate")  # one mark a batch: the watchdog sees that the rank does not hang
            number = self.world.data_rank + i * self.world.data_size
            returned = self._run(batch, number, key if samples else None, samples)
            pairs = self._pairs(returned, batch, samples, key[1])
            self._add(pairs)
            if self._checks:
                self._checks = False
                self._check_means(batch, number, samples, key[1], pairs)
        return self._results()

    def _run(self, batch: Any, number: int, key: SampleKey | None, samples: int) -> Any:
        """Return what `metrics` gives for a batch; with no key it does not count."""
        seed_all(mix_seed(self.seed, 4, number))
        with self.whole.batch(key, samples):
            rank, returned = self.engine.evaluate(self._metrics, to_device(batch, self.device))
        self.whole.is_answer = rank == self.world.rank
        return returned

    def _check_means(
        self, batch: Any, number: int, samples: int, at: int, full: Mapping[str, tuple[float, float]]
    ) -> None:
        """Raise TaskError if a number of the first batch is no mean; all ranks call it together."""
        halves = split_in_halves(batch, samples)
        sizes = (samples // 2, samples - samples // 2) if halves else (0, 0)
        first, second = (
            self._pairs(self._run(half, number, None, 0), half, size, begin)
            for half, size, begin in zip(halves or (batch, batch), sizes, (at, at + sizes[0]), strict=True)
        )
        names = names_that_differ(full, first, second, self._precision) if halves else []
        flag = torch.tensor(float(len(names)), dtype=torch.float64, device=self.device)
        if not float(self.world.sum(flag)):
            return
        again = self._pairs(self._run(batch, -1 - number, None, 0), batch, samples, at)
        for name in names:
            if not differs(full, again, name, self._precision):
                raise refuse_no_mean(name, full, first, second)

    def _map_style_batches(self) -> Iterator[tuple[Any, int, SampleKey]]:
        """Yield this rank's batches, their numbers of samples, and their first sample.

        Number 0 marks a batch that is run and not added: other ranks still have one, and collectives need every rank.
        """
        size, rank = self.world.data_size, self.world.data_rank
        chunks = self._chunks()
        rounds = -(-len(chunks) // size)
        mine = [chunks[i] if i < len(chunks) else chunks[0] for i in range(rank, rounds * size, size)]
        loader: DataLoader[Any] = DataLoader(
            SeededDataset(self.source.dataset, self.seed, self.source.collate),
            batch_sampler=mine,  # pyright: ignore[reportArgumentType] - keys, not ints
            collate_fn=self.source.collate,
            num_workers=self.source.settings.workers,
            **with_worker_start(self.source.loader_arguments),
        )
        for i, batch in enumerate(loader):
            yield batch, len(mine[i]) if rank + i * size < len(chunks) else 0, mine[i][0]

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

    def _measured(self) -> SampleLengths | None:
        """Return the lengths of the samples, of which each rank measures a part; None without `batch.tokens`."""
        world, dataset = self.world, self.source.dataset

        def add_up(lengths: Tensor) -> Tensor:
            return world.sum(lengths.to(world.device)).cpu()

        def report(done: int, of: int) -> None:
            self.mark("evaluate")

        share = (world.rank, world.size)
        return measure_lengths(
            self.task, dataset, self.seed, self.sizes, of="validation()", share=share, add_up=add_up, report=report
        )

    def _stream_batches(self) -> Iterator[tuple[Any, int, SampleKey]]:
        """Yield the same of a stream, which every rank reads as a whole."""
        size, micro = self.world.data_size, self.sizes.micro
        rounds = BatchSizes(total=micro * size, micro=micro, accumulate=1, ranks=size)
        for portion in wrap_in_workers(
            WholeStream(self.source, rounds, self.world.data_rank, self.seed, most=self.most), self.source
        ):
            if portion.fault:
                raise TaskError(portion.fault.replace("data()", "validation()"))
            ((batch, plan),) = portion.micros
            yield batch, len(plan.keys) if plan.weight else 0, plan.keys[0]

    def _metrics(self, model: nn.Module, batch: Any) -> tuple[int, Any]:
        """Return this rank's number and what the task's `metrics` gives: of a pipeline's, all get the last stage's."""
        self.whole.before_call()
        return self.world.rank, self.whole.take(self.task.metrics(model, batch))

    def _weight(self, batch: Any, samples: int, at: int) -> float:
        """Return the weight of a batch: the task's, or its samples, or their tokens; `at`: its first sample."""
        weight = self.task.weight(batch)
        if weight is not None:
            return float(weight)
        return float(samples if self._lengths is None else self._lengths.tokens(range(at, at + samples)))

    def _pairs(self, metrics: Any, batch: Any, samples: int, at: int) -> dict[str, tuple[float, float]]:
        """Return each number with its weight: 0 in a batch without samples, which is not counted."""
        if not isinstance(metrics, Mapping):
            raise TaskError(
                f"metrics() returned {metrics!r}; return a mapping of names to means or to pairs (mean, weight)"
            )
        usual = self._weight(batch, samples, at) if samples else 0.0
        pairs: dict[str, tuple[float, float]] = {}
        for name, value in metrics.items():
            if isinstance(value, WholeKind):
                self._kinds[str(name)] = value
                continue
            mean, own = value if isinstance(value, tuple) else (value, usual)
            own = float(own) if samples else 0.0
            if isinstance(mean, Tensor) and mean.numel() != 1:
                raise TaskError(f"metrics()[{name!r}] has the shape {tuple(mean.shape)}; return one number")
            pairs[str(name)] = (float(mean) if own else 0.0, own)
        return pairs

    def _add(self, pairs: Mapping[str, tuple[float, float]]) -> None:
        for name, (mean, weight) in pairs.items():
            total = self.sums.setdefault(name, [0.0, 0.0])
            total[0] += mean * weight
            total[1] += weight

    def _agree(self, names: list[str]) -> None:
        """Raise TaskError if ranks have different metrics: sums of different names would be added to one another."""
        kinds, rank = self._kinds, self.world.rank
        mine = ", ".join(f"{name} ({kinds[name].value})" if name in kinds else name for name in names)
        self.world.agree(
            "metrics",
            mine,
            lambda first: (
                f"metrics() gave {mine or 'nothing'} on rank {rank} and {first or 'nothing'} on rank 0: "
                "the names must not depend on the batch"
            ),
        )

    def _results(self) -> dict[str, float]:
        whole, names = sorted(self._kinds), sorted(self.sums)
        self._agree(sorted({*whole, *names}))
        rows = torch.tensor([self.sums[n] for n in names], dtype=torch.float64, device=self.device)
        if names:
            self.world.sum(rows)
        sums = zip(names, rows.tolist(), strict=True)
        means = {name: total / weight if weight else float("nan") for name, (total, weight) in sums}
        return means | self.whole.finish(whole)
