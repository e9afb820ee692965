"""`TokenTraces`: fake steps of a task whose batches are counted in tokens, on the largest microbatches of its data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, final

from unipar.config import BatchSizes, Config
from unipar.config.sections.batch import TokenLimits
from unipar.data.dataset import training_data_source
from unipar.data.lengths import TokenRows, measure_lengths
from unipar.data.microbatch_loader import MicrobatchLoader
from unipar.prediction.request import PredictionRequest
from unipar.task import Task
from unipar.training.fake_run.fake_task import FEWEST_SAMPLES
from unipar.training.fake_run.task_traces import PredictedStep, TaskTraces
from unipar.training.fake_run.trace_task import TracedTask
from unipar.training.task_facts import load_task, user_errors_as_task_errors
from unipar.training.warm_up.largest import LargestMicrobatches, MeanStep, find_largest_microbatches


@dataclass(frozen=True)
class _Rows:
    """Microbatch of samples that are padded to the longest, or laid one after another."""

    index: int
    """Sample that is the longest."""

    length: int
    samples: int
    """Samples of that length which need as much memory."""

    @property
    def tokens(self) -> int:
        return self.length * self.samples


def traces_of(config: Config, micro: int, task: Task | None = None) -> TaskTraces | TokenTraces:
    """Return the fake steps of a config's task; `micro`: microbatch of samples from which others are told."""
    return TaskTraces(config, micro, task) if config.batch.tokens is None else TokenTraces(config, task)


@final
class TokenTraces:
    """Fake steps of a config's task under `batch.tokens`, traced once for each length of sample that is needed.

    Planned is the microbatch that needs most, of the fullest one of the first epoch and of as many of the longest
    samples as `batch.micro` holds: those that `batch.memory_check` tries.
    """

    def __init__(self, config: Config, task: Task | None = None) -> None:
        """Measure all samples; raise TaskError if the task needs values of tensors."""
        task = task or load_task(config)
        sizes = config.batch.settle(1)
        with user_errors_as_task_errors("data()"):
            collate = task.collate if task.defines("collate") else None
            source = training_data_source(task.data(), collate, task.collate, config, sizes)
            lengths = measure_lengths(task, source.dataset, config.train.seed, sizes)
        assert lengths is not None
        self._config, self._task, self._source, self._lengths = config, task, source, lengths
        self._by_sizes: dict[BatchSizes, LargestMicrobatches] = {}
        self._traces: dict[int, TaskTraces] = {}
        first = _Rows(lengths.of.index(lengths.longest), lengths.longest, 1)
        self.whole: Final[TracedTask] = self._traced(first).whole
        """Step on the longest samples."""

    @property
    def compiled(self) -> bool:
        """True if torch.compile is at work."""
        return any(traces.compiled for traces in self._traces.values())

    @property
    def lengths(self) -> list[int]:
        """Lengths of samples that were traced, ascending."""
        return sorted(self._traces)

    def describe(self) -> Iterator[str]:
        """Yield which microbatches were planned, in sentences."""
        fixed = [sizes for sizes in self._by_sizes if sizes.tokens == self._config.batch.settle(sizes.ranks).tokens]
        for sizes in sorted(fixed, key=lambda sizes: sizes.ranks):
            longest, fullest = (f"{rows.samples} x {rows.length}" for rows in self._rows(sizes))
            yield (
                f"largest microbatches with data {sizes.ranks}: {longest} tokens, the longest samples, and {fullest}, "
                "the fullest of the first epoch; the plan takes what needs more"
            )

    def notes_on_experts(self) -> Iterator[str]:
        """Yield what is assumed of experts over ranks, for the longest samples."""
        return self._traces[max(self._traces)].notes_on_experts()

    def mean_step(self, sizes: BatchSizes) -> MeanStep:
        """Return how large a step is in the mean of the first epoch."""
        return self._largest(sizes).mean

    def micro_of(self, sizes: BatchSizes) -> int:
        """Return `batch.micro`; without it, the padded tokens of the largest microbatch."""
        limit = self._limits(sizes).micro
        return max(rows.tokens for rows in self._rows(sizes)) if limit is None else limit

    def possible_micros(self, sizes: BatchSizes) -> Sequence[int]:
        """Return the limits that a microbatch may have: from the longest sample to all tokens of a rank."""
        longest = self._lengths.longest
        return range(longest, max(longest, self.micro_of(sizes), sizes.local) + 1)

    def predict(self, request: PredictionRequest) -> PredictedStep:
        """Return a step of the fullest rank on the largest microbatches; raise Unsupported for what is not planned."""
        return max((traces.predict(own) for traces, own in self._requests(request)), key=lambda step: step.needed)

    def predict_needed(self, request: PredictionRequest) -> int:
        """Return the bytes that the fullest rank needs, sooner than `predict` does."""
        return max(traces.predict_needed(own) for traces, own in self._requests(request))

    def _requests(self, request: PredictionRequest) -> Iterator[tuple[TaskTraces, PredictionRequest]]:
        """Yield the traces of each of the largest microbatches, and what to ask of them."""
        sizes, rounds = request.sizes, self._rounds(request.sizes)
        for rows in self._rows(sizes):
            own = replace(sizes, micro=rows.tokens, accumulate=rounds)
            yield self._traced(rows), replace(request, sizes=own)

    def _rows(self, sizes: BatchSizes) -> tuple[_Rows, _Rows]:
        """Return the largest microbatches: as many of the longest samples as fit, and the fullest."""
        limits, lengths = self._limits(sizes), self._lengths
        largest = self._largest(self._config.batch.settle(sizes.ranks))

        def of(keys: Sequence[tuple[int, int]]) -> _Rows:
            mine = [i for _, i in keys]
            longest = max(mine, key=lengths.of.__getitem__)
            count = -(-lengths.tokens(mine) // lengths.of[longest]) if limits.packed else len(mine)
            return _Rows(longest, lengths.of[longest], count)

        rows = of(largest.longest), of(largest.fullest)
        if limits == self._config.batch.settle(sizes.ranks).tokens:
            return rows
        assert limits.micro is not None  # tried in place of the config's own, which was planned
        most = min(limits.micro, sizes.total)
        longest, fullest = (replace(each, samples=max(1, most // each.length)) for each in rows)
        return longest, fullest

    def _rounds(self, sizes: BatchSizes) -> int:
        """Return how many microbatches a rank has in a step at most."""
        if self._limits(sizes) == self._config.batch.settle(sizes.ranks).tokens:
            return self._largest(sizes).rounds
        return sizes.accumulate

    def _limits(self, sizes: BatchSizes) -> TokenLimits:
        assert sizes.tokens is not None
        return sizes.tokens

    def _largest(self, sizes: BatchSizes) -> LargestMicrobatches:
        if sizes not in self._by_sizes:
            loader = MicrobatchLoader(self._source, sizes, None, self._config.train.seed, lengths=self._lengths)
            self._by_sizes[sizes] = find_largest_microbatches(loader)
        return self._by_sizes[sizes]

    def _traced(self, rows: _Rows) -> TaskTraces:
        if rows.length not in self._traces:
            keys = [(0, rows.index)]
            source, sizes = replace(self._source, sampler=None), self._config.batch.settle(1)
            loader = MicrobatchLoader(source, sizes, None, self._config.train.seed, lengths=self._lengths)
            read = TokenRows(rows.length, max(FEWEST_SAMPLES, rows.samples), lambda count: loader.read(keys * count))
            self._traces[rows.length] = TaskTraces(self._config, 0, self._task, read)
        return self._traces[rows.length]
