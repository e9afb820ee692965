"""Walk through the turns of a step of one rank, whatever stages of a pipeline it has, to the peak of each phase.

A rank without a pipeline has one stage, the whole model: its microbatches follow one another, and the last is the
fullest. With a pipeline, other microbatches are in flight. unipar's own loop (gpipe, 1f1b) runs one stage on a rank,
torch's schedules (interleaved, zerobubble) several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final, Literal, NamedTuple

from unipar.config.sections.strategy import PipelineSchedule
from unipar.planning.activations import Activations
from unipar.planning.peaks import PHASES, PlannedMemory, PredictedPeak, StepSpan, built_peak, positions_of
from unipar.planning.pipeline_order import TurnWay, microbatches_in_flight, order_of_rank
from unipar.prediction.timeline import PredictedPhase, Prediction, StepTimeline, Term, TurnOfStep

Line = tuple[float, float]
"""Base and slope of bytes of a microbatch, by its samples."""

_UNANSWERED: Final = 2
"""Gradients for the stage before that unipar's loop keeps at most, until that stage has surely taken them."""


@dataclass(frozen=True, eq=False)
class PlannedStage:
    """One stage of a rank, or the whole model where there is no pipeline, with a microbatch's way through it."""

    timeline: StepTimeline
    activations: Activations
    sent_on: Line = (0.0, 0.0)
    """Hidden states for the stage behind; under torch's schedules they stay until the step ends."""

    sent_back: Line = (0.0, 0.0)
    """Gradient for the stage before; it stays as long."""

    received: Line = (0.0, 0.0)
    """Buffers of torch's schedules in which both arrive, which stay from step to step."""

    _timelines: dict[tuple[int, TurnOfStep | None], StepTimeline] = field(
        default_factory=dict[tuple[int, "TurnOfStep | None"], StepTimeline]
    )

    @cached_property
    def without_copies(self) -> PlannedStage:
        """The same without copies that are made on the CPU alone."""
        return replace(self, activations=self.activations.without_copies)

    @cached_property
    def uses_rest(self) -> bool:
        """True if parameters outside of blocks get a gradient in this stage."""
        outside = (number for number, p in enumerate(self.timeline.parameters) if p.block < 0)
        return any(self.timeline.has_gradient(number) for number in outside)

    def at(self, microbatches: int, turn: TurnOfStep | None = None) -> StepTimeline:
        """Return the timeline in a state of a step; each is made once, as it remembers its places."""
        key = microbatches, turn
        if key not in self._timelines:
            self._timelines[key] = replace(self.timeline, microbatches=microbatches, turn=turn)
        return self._timelines[key]

    def kept_at(self, way: TurnWay, micro: int) -> int:
        """Return the bytes that a microbatch keeps until such a turn of it begins."""
        tick = self.activations.moments[positions_of(self.timeline, way)[0]][0]
        return int(self.activations.levels(micro)[tick])

    def owns(self, name: str) -> bool:
        """Return whether a tensor, by its name, is of one of the stage's blocks."""
        return any(name == block or name.startswith((f"{block}.", f"{block} ")) for block in self.timeline.blocks)

    def keeps(self, term: Term) -> bool:
        """Return whether a term is there because of this stage: it is of its blocks, or a gradient of the rest."""
        return self.owns(term.name) or (term.category == "gradients" and self.uses_rest)


Predict = Callable[[PlannedStage, StepTimeline], Prediction]
"""Function that returns what a backend holds in a stage beside its activations."""


class StepState(NamedTuple):
    """State of a step in which a rank takes up a microbatch in one of its stages, or ends the step."""

    spans: tuple[StepSpan, ...]
    """Parts of the step that are run in this state."""

    place: int
    """Place of the stage among those of the rank."""

    turns: tuple[TurnOfStep | None, ...]
    """State of each stage: microbatches in flight, and those that have ended; None without a pipeline."""


@dataclass(frozen=True, eq=False)
class PlannedRank:
    """A rank with the stages of the model that it has, and the order in which it runs microbatches through them."""

    whole: PlannedStage
    """All that a rank does with a microbatch, one stage after another."""

    stages: Sequence[PlannedStage]
    schedule: PipelineSchedule | None = None
    """None: there is no pipeline."""

    ranks: int = 1
    """Ranks of the pipeline."""

    rank: int = 0

    @classmethod
    def alone(cls, stage: PlannedStage, schedule: PipelineSchedule | None = None, *seat: int) -> PlannedRank:
        """Return a rank that has one stage; `seat`: ranks of the pipeline, and its place among them."""
        return cls(stage, (stage,), schedule, *seat)

    @cached_property
    def without_copies(self) -> PlannedRank:
        """The same without copies that are made on the CPU alone."""
        return replace(
            self, whole=self.whole.without_copies, stages=tuple(stage.without_copies for stage in self.stages)
        )

    @property
    def by_torch(self) -> bool:
        """True if one of torch's schedules runs the stages."""
        return self.schedule in ("interleaved", "zerobubble")

    def states(self, microbatches: int, micro: int) -> Mapping[StepState, Sequence[Term]]:
        """Return the different states of a step, each with what other microbatches keep where that is most.

        States differ if they make a difference for what a backend holds.
        """
        if self.schedule is None:
            return {StepState(PHASES, 0, (None,)): ()}
        progress = [_Progress(stage, micro, by_torch=self.by_torch) for stage in self.stages]
        fullest: dict[StepState, Sequence[Term]] = {}
        order = order_of_rank(self.schedule, self.ranks, self.rank, microbatches, len(self.stages))
        for number, turn in order:
            place, way = number // self.ranks, turn.way
            progress[place].begin(way)
            phase: PredictedPhase = "forward" if way == "forward" else "backward"
            turns = (each.state(phase if each is progress[place] else "forward", microbatches) for each in progress)
            state = StepState((way,), place, tuple(turns))
            kept = _kept_by_torch(progress) if self.by_torch else progress[place].kept_by_loop(way)
            fullest[state] = max(fullest.get(state, ()), tuple(kept), key=lambda terms: sum(t.size for t in terms))
            progress[place].end(way)
        place = next((place for place, stage in enumerate(self.stages) if stage.uses_rest), 0)
        ended = (TurnOfStep("update", 0, microbatches - 1),) * len(self.stages)
        return fullest | {StepState((span,), place, ended): () for span in ("update", "steady")}

    def on_host(self, micro: int, microbatches: int) -> Iterator[Term]:
        """Yield the activations that are kept on the host, of as many microbatches as are in flight at most."""
        most = [1] * len(self.stages) if self.schedule is None else self._most_in_flight(microbatches)
        for stage, number in zip(self.stages, most, strict=True):
            yield from stage.activations.on_host(micro, number)

    def _most_in_flight(self, microbatches: int) -> list[int]:
        """Return the most microbatches that wait for their backward, or run it, in each stage."""
        assert self.schedule is not None
        order = order_of_rank(self.schedule, self.ranks, self.rank, microbatches, len(self.stages))
        places = range(len(self.stages))
        return [microbatches_in_flight([turn for n, turn in order if n // self.ranks == place]) for place in places]

    def sent(self, span: StepSpan, microbatches: int, micro: int) -> Iterator[Term]:
        """Yield what torch holds for what stages send to each other."""
        if self.by_torch:
            received = microbatches * sum(_bytes(stage.received, micro) for stage in self.stages)
            yield Term("communication", "buffers for what other stages send", received)
        if self.schedule == "zerobubble" and span in ("update", "steady"):
            back = microbatches * sum(_bytes(stage.sent_back, micro) for stage in self.stages)
            yield Term("communication", "gradients for the stages before", back)

    def of_others(self, state: StepState, own: Sequence[Term], microbatches: int, predict: Predict) -> Iterator[Term]:
        """Yield what a backend holds of the stages that do not run, beside its terms of the one that does."""
        now, (span, *_) = self.stages[state.place], state.spans
        begin = positions_of(now.timeline, span)[0]
        named = {term.name for term in own if term.category == "gradients" and term.is_there(begin)}
        for place, (stage, turn) in enumerate(zip(self.stages, state.turns, strict=True)):
            if place != state.place and turn is not None:
                resting: StepSpan = "steady" if span == "steady" else "update" if turn.phase == "update" else "forward"
                at = positions_of(stage.timeline, resting)[0]
                for term in predict(stage, stage.at(microbatches, turn)).terms:
                    new = stage.owns(term.name) or term.name not in named
                    if term.is_there(at) and stage.keeps(term) and new:
                        yield replace(term, first=0, until=None)


class _Progress:
    """Microbatches of one stage by what they have done."""

    def __init__(self, stage: PlannedStage, micro: int, *, by_torch: bool) -> None:
        self.on, self.back = _bytes(stage.sent_on, micro), _bytes(stage.sent_back, micro)
        self.forwarded = self.halved = self.ended = 0
        self._size = stage.kept_at("backward", micro)
        self._size_of_half = stage.kept_at("weights", micro) if by_torch else 0
        self._by_torch = by_torch
        self._after: Literal["", "forward", "backward"] = ""

    def begin(self, way: TurnWay) -> None:
        """Take a microbatch out of those that wait for this turn."""
        self.halved -= way == "weights"
        self.forwarded -= way in ("backward", "inputs")

    def end(self, way: TurnWay) -> None:
        """Put the microbatch among those that wait for the next."""
        self.forwarded += way == "forward"
        self.halved += way == "inputs"
        self.ended += way in ("backward", "weights")
        self._after = "forward" if way == "forward" else "backward"

    @property
    def in_flight(self) -> int:
        """Bytes that microbatches keep for their backward."""
        return self.forwarded * self._size + self.halved * self._size_of_half

    def kept_by_loop(self, way: TurnWay) -> Iterator[Term]:
        """Yield what unipar's loop holds of other microbatches."""
        kept = {
            "microbatches in flight": self.in_flight,
            "gradients sent back": min(self.ended, _UNANSWERED) * self.back,
        }
        if way == "forward" and self.ended:
            kept["output of the microbatch before, its gradient and input"] = 2 * self.on + self.back
        for name, size in kept.items():
            if size:
                yield Term("activations", name, size)

    def state(self, phase: PredictedPhase, microbatches: int) -> TurnOfStep:
        """Return what the stage has done, as far as it makes a difference for what a backend holds."""
        if self.ended == microbatches:
            return TurnOfStep("update", 0, microbatches - 1)
        ended = 1 if 0 < self.ended < microbatches - 1 else self.ended
        return TurnOfStep(phase, min(self.forwarded + self.halved, 1), ended, self._after, told=self._by_torch)


def _kept_by_torch(progress: Sequence[_Progress]) -> Iterator[Term]:
    """Yield what torch's schedules hold of other microbatches: of all stages, and what was sent until the end."""
    if kept := sum(each.in_flight + each.ended * (each.on + each.back) for each in progress):
        yield Term("activations", "other microbatches", kept)


def _bytes(line: Line, micro: int) -> int:
    base, slope = line
    return round(base + slope * micro)


def predict_peaks(rank: PlannedRank, predict: Predict, micro: int, accumulate: int) -> list[PredictedPeak]:
    """Return the peak of each phase of a step of a rank with `accumulate` microbatches of `micro` samples.

    Before them comes the set-up ("built"), if the backend has terms for it.
    """
    fullest: dict[PredictedPhase, PredictedPeak] = {}
    for state, kept in rank.states(accumulate, micro).items():
        stage = rank.stages[state.place]
        now = stage.at(accumulate, state.turns[state.place])
        own = predict(stage, now).terms
        sent, others = rank.sent(state.spans[0], accumulate, micro), rank.of_others(state, own, accumulate, predict)
        memory = PlannedMemory(now, Prediction((*own, *sent, *kept, *others)), stage.activations, micro, accumulate)
        for peak in memory.peaks(state.spans):
            if peak.phase not in fullest or peak.peak > fullest[peak.phase].peak:
                fullest[peak.phase] = peak
    return [*built_peak(predict(rank.whole, rank.whole.at(accumulate))), *fullest.values()]
