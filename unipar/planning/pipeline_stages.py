"""Peaks of a rank that has one stage of a pipeline, with several microbatches in flight."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from unipar.config.sections.strategy import PipelineSchedule
from unipar.planning.activations import Activations
from unipar.planning.peaks import PredictedPeak, built_peak, predict_peaks
from unipar.planning.pipeline_order import microbatch_order
from unipar.prediction.timeline import PredictedPhase, Prediction, StepTimeline, Term, TurnOfStep

_UNANSWERED = 2
"""Gradients for the stage before that a rank keeps at most, until that stage has surely taken them."""


@dataclass(frozen=True)
class PlannedStage:
    """Stage of a pipeline, and the order in which it runs microbatches."""

    schedule: PipelineSchedule
    stages: int
    stage: int
    sent_on: tuple[float, float]
    """Base and slope of the bytes of hidden states for the stage behind."""

    sent_back: tuple[float, float]
    """Base and slope of the bytes of a gradient for the stage before."""

    def between(self, turn: TurnOfStep, kept: int, micro: int) -> Iterator[tuple[str, int]]:
        """Yield what a rank holds of other microbatches; `kept`: what one keeps between forward and backward."""
        on, back = (round(base + slope * micro) for base, slope in (self.sent_on, self.sent_back))
        yield "microbatches in flight", turn.in_flight * kept
        yield "gradients sent back", min(turn.ended, _UNANSWERED) * back
        if turn.phase == "forward" and turn.ended:
            yield "output of the microbatch before, its gradient and input", 2 * on + back

    def turns(self, microbatches: int) -> list[TurnOfStep]:
        """Return the states of a step in which it is fullest, at least one for each phase."""
        in_flight = ended = 0
        before: Literal["", "forward", "backward"] = ""
        fullest: dict[tuple[object, ...], TurnOfStep] = {}
        for turn in microbatch_order(self.schedule, self.stages, self.stage, microbatches):
            if turn.way == "forward":
                state = TurnOfStep("forward", in_flight, ended, before)
                in_flight += 1
            else:
                in_flight -= 1
                state = TurnOfStep("backward", in_flight, ended, before)
                ended += 1
            before = "forward" if turn.way == "forward" else "backward"
            key = state.phase, state.ended > 0, state.ended == microbatches - 1, state.after
            fullest[key] = max(fullest.get(key, state), state, key=lambda s: (s.in_flight, min(s.ended, _UNANSWERED)))
        return [*fullest.values(), TurnOfStep("update", 0, microbatches - 1)]


def predict_stage_peaks(
    planned: PlannedStage,
    timeline: StepTimeline,
    predict: Callable[[StepTimeline], Prediction],
    activations: Activations,
    micro: int,
) -> list[PredictedPeak]:
    """Return the peak of each phase of a step; `predict` tells what a backend holds beside the activations."""
    kept = _bytes_between(activations, micro)
    fullest: dict[PredictedPhase, PredictedPeak] = {}
    for turn in planned.turns(timeline.microbatches):
        now = replace(timeline, turn=turn)
        until = timeline.at("update")
        more = [Term("activations", what, size, 0, until) for what, size in planned.between(turn, kept, micro) if size]
        terms = (*predict(now).terms, *more)
        for peak in predict_peaks(now, Prediction(terms), activations, micro, timeline.microbatches):
            own = peak.phase == turn.phase or (turn.phase == "update" and peak.phase == "steady")
            if own and (peak.phase not in fullest or peak.peak > fullest[peak.phase].peak):
                fullest[peak.phase] = peak
    return [*built_peak(predict(timeline)), *(fullest[phase] for phase in _phases(timeline))]


def _phases(timeline: StepTimeline) -> Sequence[PredictedPhase]:
    return list(dict.fromkeys(moment.phase for moment in timeline.moments))


def _bytes_between(activations: Activations, micro: int) -> int:
    """Return the bytes that a microbatch keeps between forward and backward."""
    begin = next(tick for tick, moment in activations.moments if (moment.phase, moment.what) == ("backward", "begin"))
    return int(activations.levels(micro)[begin])
