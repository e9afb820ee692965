"""`TaskTraces`: fake steps of a task, whole and split along axes of a mesh, each traced when it is first asked for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from operator import attrgetter
from typing import Any, Final, final, get_args

from torch import nn

from unipar.backend import Backend, Part, registry
from unipar.backend.precision import autocast_dtype
from unipar.config import BatchSizes, Config
from unipar.config.sections.strategy import Axes
from unipar.config.settled import SettledConfig
from unipar.data.lengths import TokenRows
from unipar.model.without_values import explain_values
from unipar.planning.cpu_copies import late_bytes, needed_with_gloo
from unipar.planning.peaks import OffloadedBytes, PlannedMemory, PredictedPeak, predict_offloaded
from unipar.planning.schedule_walk import PlannedStage, predict_peaks
from unipar.planning.speed import StepSpeed
from unipar.prediction.ranks_of_machines import count_across, settle_request
from unipar.prediction.request import PredictionRequest
from unipar.prediction.terms import TEMPORARIES_OF_UPDATE, averaging_terms, predict_whole
from unipar.prediction.timeline import CommVolume, PredictedPhase, Prediction, StepTimeline, Term
from unipar.task import Task
from unipar.training.fake_run.compiled import summarize_error
from unipar.training.fake_run.interleaved_ranks import ranks_of_pieces
from unipar.training.fake_run.step import sent_by_loop
from unipar.training.fake_run.trace_task import (
    TracedTask,
    in_full_precision,
    trace_compiled,
    trace_fake_task,
    trace_part,
    trace_whole,
)
from unipar.training.warm_up.largest import MeanStep
from unipar.utils.text import format_size

_ORDER: Final = get_args(PredictedPhase)


@dataclass(frozen=True)
class PredictedStep:
    """A step of the fullest rank of a strategy."""

    phases: tuple[PredictedPeak, ...]
    """Peak of each phase."""

    sent: tuple[CommVolume, ...]
    traced: TracedTask
    """Fake step of that rank."""

    late: int = 0
    """Bytes by which the peak may be higher for a moment, because collectives free their copies late."""

    offloaded: tuple[OffloadedBytes, ...] = ()
    """Bytes outside of the device."""

    speed: StepSpeed | None = None
    """Seconds of the step; None without a machine."""

    @property
    def peak(self) -> int:
        """Bytes at the fullest moment, be it before the first step."""
        return max(phase.peak for phase in self.phases)

    @property
    def step_peak(self) -> PredictedPeak:
        """The fullest phase of a step."""
        return max((phase for phase in self.phases if phase.phase != "built"), key=lambda phase: phase.peak)

    @property
    def needed(self) -> int:
        """Bytes in which the step fits whenever collectives free their copies."""
        return self.peak + self.late


@final
class TaskTraces:
    """Fake steps of a config's task, of which each is traced once: numbers of ranks of the data share them."""

    def __init__(self, config: Config, micro: int, task: Task | None = None, rows: TokenRows | None = None) -> None:
        """Take the microbatch from which others are told; raise TaskError if the task needs values of tensors.

        `task`: None for the config's own. `rows`: microbatches of samples of one length, if they are counted in tokens.
        """
        assert config.batch.tokens is None or rows is not None, "batches of tokens are for TokenTraces"
        self._fake, self.whole = trace_fake_task(config, micro, task, rows)
        self._parts: dict[tuple[str, Axes, str], tuple[TracedTask, ...]] = {}
        self._predictions: dict[object, Prediction] = {}
        self._compiled: dict[int, TracedTask] | None = None
        """Steps under torch.compile, by the size of the microbatch; None: it is not at work."""

        if config.model.compiling is not None:
            try:
                self._compiled = {self._fake.micro: trace_compiled(self._fake, self.whole, self._fake.micro)}
            except Exception as e:
                note = f"model.compile is planned as if it were off ({summarize_error(e)})"
                self.whole = replace(self.whole, assumed=(*self.whole.assumed, note))

    def mean_step(self, sizes: BatchSizes) -> MeanStep:
        """Return how large a step of these sizes is: all are alike."""
        return MeanStep(sizes.micro, sizes.accumulate, sizes.total)

    def describe(self) -> tuple[str, ...]:
        """Return which microbatches are planned, in sentences; none, as all are alike."""
        return ()

    def micro_of(self, sizes: BatchSizes) -> int:
        """Return the samples of a microbatch."""
        return sizes.micro

    def possible_micros(self, sizes: BatchSizes) -> Sequence[int]:
        """Return the sizes that a microbatch may have with the same total, ascending."""
        return sizes.possible_micros

    @property
    def compiled(self) -> bool:
        """True if torch.compile is at work."""
        return self._compiled is not None

    def of(self, config: Config, micro: int | None = None) -> Sequence[TracedTask]:
        """Return a step of each rank that holds or does something else, in a config of the same task.

        `micro`: size of the microbatches, of which each is traced where torch.compile is at work.
        """
        axes = config.parallel.axes
        if not axes.split:
            if self._compiled is None:
                return (self.whole,)
            micro = micro or self._fake.micro
            if micro not in self._compiled:
                self._compiled[micro] = trace_compiled(self._fake, self.whole, micro)
            return (self._compiled[micro],)
        key = config.backend, axes, str(config.options.get(config.backend))
        if key not in self._parts:
            self._parts[key] = tuple(self._trace_parts(config, registry.find_backend(config.backend)))
        return self._parts[key]

    def notes_on_experts(self) -> Iterator[str]:
        """Yield what is assumed of experts over ranks, and what they would need at worst, for each number of ranks."""
        worst: dict[int, tuple[int, int]] = {}
        for (_, axes, _), traced in self._parts.items():
            for each in traced:
                if each.worst_routing is not None:
                    peaks = [int(max(a.levels(self._fake.micro))) for a in (each.activations, each.worst_routing)]
                    worst[axes.expert] = max(worst.get(axes.expert, (0, 0)), (peaks[1], peaks[0]))
        for ranks, (most, even) in sorted(worst.items()):
            yield (
                f"expert{ranks}: planned is that each rank's experts get as many rows as it sends; a microbatch then "
                f"allocates {format_size(even)}, and {format_size(most)} if one rank's experts get the rows of all "
                f"{ranks}"
            )

    def predict(self, request: PredictionRequest) -> PredictedStep:
        """Return a step of the fullest rank; raise Unsupported for what is not planned yet."""
        return max(self.predict_ranks(request), key=lambda step: step.needed)

    def predict_ranks(self, request: PredictionRequest) -> list[PredictedStep]:
        """Return a step of each rank that holds or does something else."""
        request = settle_request(request)
        return [self._predict_rank(request, traced) for traced in self.of(request.config, request.sizes.micro)]

    def predict_needed(self, request: PredictionRequest) -> int:
        """Return the bytes that the fullest rank needs, sooner than `predict` does."""
        request = settle_request(request)
        if request.config.parallel.axes.pipeline > 1:
            return self.predict(request).needed
        # what is held does not depend on how many microbatches came before, if there were some
        few = min(request.sizes.accumulate, 2)
        needed = needed_with_gloo if request.uses_gloo else PlannedMemory.highest
        return max(
            needed(memory)
            for traced in self.of(request.config, request.sizes.micro)
            for memory in (self._last_microbatch(request, traced, few), *self._passes_of_proof(request, traced))
        )

    def _predict_rank(self, request: PredictionRequest, traced: TracedTask) -> PredictedStep:
        sizes, rank = request.sizes, traced.rank_on(request.device)
        last = self._last_microbatch(request, traced, sizes.accumulate)
        proving = list(self._passes_of_proof(request, traced))
        phases = [replace(_fullest(memory.peaks()), phase="built") for memory in proving]
        phases += predict_peaks(rank, partial(self._predict, request), sizes.micro, sizes.accumulate)
        late = 0
        if request.uses_gloo and rank.schedule is None:
            late = max(map(needed_with_gloo, (last, *proving))) - _fullest(phases).peak
        elif request.uses_gloo:
            late = late_bytes(last.prediction, rank.whole.activations, sizes.micro)
        names = sorted({phase.phase for phase in phases}, key=_ORDER.index)
        traffic = (each.of_step(sizes.micro, sizes.accumulate) for each in traced.sent)
        weighs = self._fake.task.defines("weight")
        loop = sent_by_loop(request.config, request.ranks, weighs=weighs, of_experts=traced.logged_of_experts)
        sent = (*last.prediction.sent, *traffic, *loop)
        return PredictedStep(
            tuple(_fullest(peak for peak in phases if peak.phase == name) for name in names),
            count_across(sent, request.config, request.ranks, request.ranks_per_machine),
            traced,
            late,
            tuple(predict_offloaded(last.timeline, last.prediction, list(rank.on_host(sizes.micro, sizes.accumulate)))),
        )

    def _last_microbatch(self, request: PredictionRequest, traced: TracedTask, microbatches: int) -> PlannedMemory:
        """Return the memory of a rank as if one microbatch ran through all its stages after this many others."""
        stage, sizes = traced.rank_on(request.device).whole, request.sizes
        timeline = stage.at(microbatches)
        prediction = self._predict(request, stage, timeline)
        return PlannedMemory(timeline, prediction, stage.activations, sizes.micro, sizes.accumulate)

    def _passes_of_proof(self, request: PredictionRequest, traced: TracedTask) -> Iterator[PlannedMemory]:
        """Yield what proves in the set-up that parts are the whole model, as if it were a step."""
        if (proof := traced.proof) is None:
            return
        micro = request.sizes.micro
        if proof.part is not None:
            part = proof.part if request.device == "cpu" else proof.part.without_copies
            timeline = part.at(1)
            yield PlannedMemory(
                timeline, _without_states(self._predict(request, part, timeline)), part.activations, micro
            )
        if request.device == "cpu":  # else that is the host's memory
            stage = proof.whole
            terms = list(predict_whole(stage.timeline, buckets=False))
            if request.config.parallel.expert > 1:  # gradients are added up over a microbatch for each rank of experts
                trained = sum(p.size for p in stage.timeline.parameters if p.trained)
                terms.append(Term("temporaries", "gradients of other microbatches", trained))
            prediction = _without_states(Prediction(tuple(terms)))
            yield PlannedMemory(stage.timeline, prediction, stage.activations, micro)

    def _predict(self, request: PredictionRequest, stage: PlannedStage, timeline: StepTimeline) -> Prediction:
        """Return what a backend makes of a timeline; each is asked for once, whatever the size of microbatches."""
        config = request.config
        own = config.backend, str(config.parallel), str(config.options.get(config.backend))
        key = stage, timeline.microbatches, timeline.turn, request.ranks, request.device, request.runtime, *own
        if key not in self._predictions:
            backend = registry.find_backend(config.backend)
            prediction = backend.predict(config, timeline, request.ranks, device=request.device)
            more = averaging_terms(timeline, prediction.terms)
            self._predictions[key] = replace(prediction, terms=(*prediction.terms, *more, *request.runtime))
        return self._predictions[key]

    def _trace_parts(self, config: Config, backend: Backend) -> list[TracedTask]:
        fake = self._fake
        part = Part(
            fake.name,
            fake.model,
            optimizer=_no_optimizer,
            blocks=fake.blocks,
            loss=fake.task.loss,
            sample=lambda: fake.batch(fake.micro),
            tensor=fake.task.tensor(fake.model),
            cuts=fake.task.cuts(config.parallel.axes.stages),
            experts=fake.task.experts(fake.model) if config.parallel.expert > 1 else None,
        )
        with explain_values("the split model"):
            axes = config.parallel.axes
            parts = backend.split_for_plan(part, config)
            traced = [
                trace_part(fake, self.whole, each, axes, self._whole_in_full if each.proved else None) for each in parts
            ]
        if axes.pieces == 1:
            return traced
        by_stage = dict(zip((each.stage for each in parts), traced, strict=True))
        return ranks_of_pieces(axes, by_stage, parts[0].alike)

    @cached_property
    def _whole_in_full(self) -> PlannedStage:
        """A step of the whole model without autocast."""
        if autocast_dtype(self._fake.config.train.precision) is None:
            return self.whole.rank.whole
        return trace_whole(in_full_precision(self._fake)).rank.whole


def _fullest(peaks: Iterable[PredictedPeak]) -> PredictedPeak:
    return max(peaks, key=attrgetter("peak"))


def _without_states(prediction: Prediction) -> Prediction:
    """Return what a backend holds before the optimizer's first step."""
    before = [t for t in prediction.terms if t.category != "optimizer" and t.name != TEMPORARIES_OF_UPDATE]
    return replace(prediction, terms=tuple(before), built=())


def _no_optimizer(model: nn.Module) -> Any:
    raise AssertionError("nothing is trained")


def predict_peaks_by_micro(settled: SettledConfig, traces: TaskTraces, micros: Iterable[int]) -> Mapping[int, int]:
    """Return the bytes that a rank needs for microbatches of these sizes, with the total batch kept.

    All ranks are on this machine, unless the config's `machines` say otherwise.
    """
    config, ranks = settled.config, settled.ranks
    device = "cpu" if settled.device == "cpu" else "cuda"
    request = PredictionRequest(config, ranks, settled.sizes, device, config.ranks_of_machine(ranks) or ranks)
    return {micro: traces.predict_needed(request.with_micro(micro)) for micro in micros}
