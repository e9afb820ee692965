"""`TaskTraces`: fake steps of a task, whole and split along axes of a mesh, each traced when it is first asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
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
from unipar.planning.activations import Activations, MicrobatchPayload
from unipar.planning.interleaved_peaks import StagePiece, predict_piece_peaks
from unipar.planning.peaks import (
    OffloadedBytes,
    PredictedPeak,
    late_bytes,
    predict_needed,
    predict_offloaded,
    predict_peak,
    predict_peaks,
)
from unipar.planning.pipeline_stages import PlannedStage, predict_stage_peaks
from unipar.prediction.rank_part import RankPart
from unipar.prediction.ranks_of_machines import count_across, settle_shard_over
from unipar.prediction.terms import TEMPORARIES_OF_UPDATE, averaging_terms, predict_whole
from unipar.prediction.timeline import Payload, PredictedPhase, Prediction, StepTimeline, Term
from unipar.task import Task
from unipar.training.fake_run.compiled import summarize_error
from unipar.training.fake_run.interleaved_ranks import ranks_of_pieces
from unipar.training.fake_run.step import FakeStep, sent_by_loop
from unipar.training.fake_run.trace_task import (
    FEWEST_SAMPLES,
    FakeTask,
    Proof,
    TracedTask,
    combine_steps,
    line_through,
    trace_compiled,
    trace_fake_task,
    trace_whole,
)
from unipar.training.warm_up.largest import MeanStep

_ORDER: Final = get_args(PredictedPhase)


@dataclass(frozen=True)
class PredictedStep:
    """A step of the fullest rank of a strategy."""

    phases: tuple[PredictedPeak, ...]
    """Peak of each phase."""

    sent: tuple[Payload, ...]
    traced: TracedTask
    """Fake step of that rank."""

    late: int = 0
    """Bytes by which the peak may be higher for a moment, because collectives free their copies late."""

    offloaded: tuple[OffloadedBytes, ...] = ()
    """Bytes outside of the device."""

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
        self._parts: dict[object, tuple[TracedTask, ...]] = {}
        self._predictions: dict[object, Prediction] = {}
        self._timelines: dict[tuple[int, int], StepTimeline] = {}
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
        if axes.ranks == 1:
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

    def predict(
        self,
        config: Config,
        ranks: int,
        sizes: BatchSizes,
        *,
        device: str,
        runtime: Sequence[Term] = (),
        per: int | None = None,
    ) -> PredictedStep:
        """Return a step of the fullest of so many ranks; raise Unsupported for what is not planned yet.

        `device`: cpu or cuda. `runtime`: what a process holds beside the backend's terms. `per`: ranks of a machine;
        None: it is not known.
        """
        steps = self.predict_ranks(config, ranks, sizes, device=device, runtime=runtime, per=per)
        return max(steps, key=lambda step: step.needed)

    def predict_ranks(
        self,
        config: Config,
        ranks: int,
        sizes: BatchSizes,
        *,
        device: str,
        runtime: Sequence[Term] = (),
        per: int | None = None,
    ) -> list[PredictedStep]:
        """Return a step of each of so many ranks that holds or does something else."""
        config = settle_shard_over(config, ranks, per)
        found: list[PredictedStep] = []
        for number, traced in enumerate(self.of(config, sizes.micro)):
            part = self._key_of_part(number, sizes)

            def predict(timeline: StepTimeline, part: object = part) -> Prediction:
                return self._predict(config, ranks, part, timeline, device, runtime)

            timeline = self._timeline(traced, sizes.accumulate)
            prediction = predict(timeline)
            activations = traced.activations if device == "cpu" else traced.activations.without_copies
            gloo, late = device == "cpu" and ranks > 1, 0
            proving = list(self._passes_of_proof(traced, predict, device))
            built = [replace(_fullest(predict_peaks(*each, sizes.micro)), phase="built") for each in proving]
            if traced.pieces is not None:

                def predict_piece(place: int | None, timeline: StepTimeline, number: int = number) -> Prediction:
                    return self._predict(config, ranks, (number, place), timeline, device, runtime)

                staged = device == "cpu"
                of_pieces = predict_piece_peaks(traced.pieces, timeline, predict_piece, sizes.micro, staged=staged)
                phases = [*built, *of_pieces]
                if gloo:
                    late = late_bytes(prediction, activations, sizes.micro)
            elif traced.stage is None:
                step = timeline, prediction, activations, sizes.micro, sizes.accumulate
                phases = [*built, *predict_peaks(*step)]
                if gloo:
                    needed = max(predict_needed(*step), *(predict_needed(*each, sizes.micro) for each in proving), 0)
                    late = needed - max(phase.peak for phase in phases)
            else:
                phases = [*built, *predict_stage_peaks(traced.stage, timeline, predict, activations, sizes.micro)]
                if gloo:
                    late = late_bytes(prediction, activations, sizes.micro)
            names = sorted({phase.phase for phase in phases}, key=_ORDER.index)
            phases = [_fullest(peak for peak in phases if peak.phase == name) for name in names]
            traffic = tuple(each.of_step(sizes.micro, sizes.accumulate) for each in traced.sent)
            outside = tuple(predict_offloaded(timeline, prediction))
            loop = sent_by_loop(config, ranks, weighs=self._fake.task.defines("weight"))
            sent = count_across((*prediction.sent, *traffic, *loop), config, ranks, per)
            found.append(PredictedStep(tuple(phases), sent, traced, late, outside))
        return found

    def predict_needed(
        self,
        config: Config,
        ranks: int,
        sizes: BatchSizes,
        *,
        device: str,
        runtime: Sequence[Term] = (),
        per: int | None = None,
    ) -> int:
        """Return the bytes that the fullest of so many ranks needs, sooner than `predict` does."""
        config = settle_shard_over(config, ranks, per)
        if config.parallel.axes.pipeline > 1:
            return self.predict(config, ranks, sizes, device=device, runtime=runtime, per=per).needed
        most = 0
        for number, traced in enumerate(self.of(config, sizes.micro)):
            part = self._key_of_part(number, sizes)
            # what is held does not depend on how many microbatches came before, if there were some
            timeline = self._timeline(traced, min(sizes.accumulate, 2))

            def predict(timeline: StepTimeline, part: object = part) -> Prediction:
                return self._predict(config, ranks, part, timeline, device, runtime)

            prediction = predict(timeline)
            activations = traced.activations if device == "cpu" else traced.activations.without_copies
            needs = predict_needed if device == "cpu" and ranks > 1 else predict_peak
            most = max(most, needs(timeline, prediction, activations, sizes.micro, sizes.accumulate))
            proving = self._passes_of_proof(traced, predict, device)
            most = max(most, *(needs(*each, sizes.micro) for each in proving), 0)
        return most

    def _key_of_part(self, number: int, sizes: BatchSizes) -> object:
        return number if self._compiled is None else (number, sizes.micro)

    def _passes_of_proof(
        self, traced: TracedTask, predict: Callable[[StepTimeline], Prediction], device: str
    ) -> Iterator[tuple[StepTimeline, Prediction, Activations]]:
        """Yield what proves in the set-up that parts are the whole model, as if it were a step."""
        if (proof := traced.proof) is None:
            return
        if proof.part is not None:
            timeline = self._timeline(traced, 1)
            part = proof.part if device == "cpu" else proof.part.without_copies
            yield timeline, _without_states(predict(timeline)), part
        if device == "cpu":  # else that is the host's memory
            whole = proof.whole.timeline
            yield (
                whole,
                _without_states(Prediction(tuple(predict_whole(whole, buckets=False)))),
                proof.whole.activations,
            )

    def _timeline(self, traced: TracedTask, microbatches: int) -> StepTimeline:
        """Return the step's timeline with so many microbatches; each is made once, as it remembers its places."""
        key = id(traced), microbatches
        if key not in self._timelines:
            self._timelines[key] = replace(traced.timeline, microbatches=microbatches)
        return self._timelines[key]

    def _predict(
        self, config: Config, ranks: int, part: object, timeline: StepTimeline, device: str, runtime: Sequence[Term]
    ) -> Prediction:
        """Return what a backend makes of a timeline; each is asked for once, whatever the size of microbatches."""
        own = str(config.parallel), str(config.options.get(config.backend)), timeline.microbatches, timeline.turn
        key = config.backend, ranks, part, device, *own, tuple(runtime)
        if key not in self._predictions:
            found = registry.find_backend(config.backend).predict(config, timeline, ranks, device=device)
            more = averaging_terms(timeline, found.terms)
            self._predictions[key] = replace(found, terms=(*found.terms, *more, *runtime))
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
        )
        with explain_values("the split model"):
            axes = config.parallel.axes
            parts = backend.split_for_plan(part, config)

            def trace(each: RankPart) -> TracedTask:
                in_full = self._whole_in_full if each.proved else None
                return _trace_part(fake, self.whole, each, axes, in_full)

            if axes.pieces == 1:
                return [trace(each) for each in parts]
            return ranks_of_pieces(axes, {each.stage: trace(each) for each in parts}, parts[0].alike)

    @cached_property
    def _whole_in_full(self) -> TracedTask:
        """A step of the whole model without autocast."""
        if autocast_dtype(self._fake.config.train.precision) is None:
            return self.whole
        return trace_whole(_in_full_precision(self._fake))


def _in_full_precision(fake: FakeTask) -> FakeTask:
    return replace(fake, config=fake.config.changed({"train.precision": "fp32"}))


def _fullest(peaks: Iterable[PredictedPeak]) -> PredictedPeak:
    return max(peaks, key=attrgetter("peak"))


def _without_states(prediction: Prediction) -> Prediction:
    """Return what a backend holds before the optimizer's first step."""
    before = [t for t in prediction.terms if t.category != "optimizer" and t.name != TEMPORARIES_OF_UPDATE]
    return replace(prediction, terms=tuple(before), built=())


def _trace_part(
    fake: FakeTask, whole: TracedTask, part: RankPart, axes: Axes, proof_of_whole: TracedTask | None
) -> TracedTask:
    few = max(FEWEST_SAMPLES, fake.micro)  # of one sample, parts of a sequence may need no copies
    counts = (few, few + fake.micro)
    in_full: Activations | None = None
    with part.placed():
        if proof_of_whole is not None and axes.pieces == 1 and autocast_dtype(fake.config.train.precision) is not None:
            in_full = combine_steps(*(_in_full_precision(fake).trace(count, part) for count in counts))
        steps: list[FakeStep] = []
        sent_on: list[tuple[int, int]] = []
        sent_back: list[tuple[int, int]] = []
        received: list[tuple[int, int]] = []
        for count in counts:
            steps.append(fake.trace(count, part))
            sent_on.append((count, part.sent_on))
            sent_back.append((count, part.sent_back))
            received.append((count, part.received))
        first, second = steps
        activations = combine_steps(first, second)
        timeline = fake.timeline(part.blocks, first, part.stages_of)
    timeline = replace(timeline, whole=whole.timeline.parameters)
    sent = tuple(_payloads(first, second, part))
    proof = None if proof_of_whole is None else Proof(proof_of_whole, in_full)
    found = replace(whole, timeline=timeline, activations=activations, sent=sent, proof=proof)
    if axes.pipeline == 1:
        return found
    on, back = line_through(*sent_on), line_through(*sent_back)
    if axes.pieces > 1:
        return replace(found, piece=StagePiece(timeline, activations, on, back, line_through(*received)))
    return replace(found, stage=PlannedStage(axes.schedule, axes.pipeline, part.stage, on, back))


def _payloads(first: FakeStep, second: FakeStep, part: RankPart) -> Sequence[MicrobatchPayload]:
    found: list[MicrobatchPayload] = []
    for (axis, collective), size in first.sent.items():
        base, slope = line_through((first.micro, size), (second.micro, second.sent[axis, collective]))
        calls = first.calls[axis, collective]
        found.append(
            MicrobatchPayload(axis, collective, base, slope, calls, part.mesh.sizes.get(axis, part.mesh.ranks))
        )
    return found


def _no_optimizer(model: nn.Module) -> Any:
    raise AssertionError("nothing is trained")


def predict_peaks_by_micro(settled: SettledConfig, traces: TaskTraces, micros: Iterable[int]) -> Mapping[int, int]:
    """Return the bytes that a rank needs for microbatches of these sizes, with the total batch kept.

    All ranks are on this machine, unless the config's `machines` say otherwise.
    """
    device = "cpu" if settled.device == "cpu" else "cuda"
    config, ranks = settled.config, settled.ranks
    per = config.ranks_of_machine(ranks) or ranks
    return {
        micro: traces.predict_needed(config, ranks, settled.sizes.with_micro(micro), device=device, per=per)
        for micro in micros
    }
