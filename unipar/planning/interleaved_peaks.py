"""Peaks of a rank that has several stages of a pipeline, each with microbatches in flight, in the order of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from unipar.config.sections.strategy import PipelineSchedule
from unipar.planning.activations import Activations
from unipar.planning.peaks import PredictedPeak, built_peak, peaks_between
from unipar.planning.pipeline_order import TurnWay, order_of_rank
from unipar.prediction.timeline import PredictedPhase, Prediction, StepTimeline, Term, TurnOfStep

Line = tuple[float, float]
"""Base and slope of bytes that a microbatch has, by its samples."""


@dataclass(frozen=True)
class StagePiece:
    """One of a rank's stages, with a microbatch's way through it."""

    timeline: StepTimeline
    activations: Activations
    sent_on: Line
    """Hidden states for the stage behind, which stay until the step ends."""

    sent_back: Line
    """Gradient for the stage before, which does, too."""

    received: Line
    """Buffers in which both arrive, which stay from step to step."""

    @cached_property
    def uses_rest(self) -> bool:
        """True if parameters outside of blocks get a gradient in this stage."""
        outside = (number for number, p in enumerate(self.timeline.parameters) if p.block < 0)
        return any(self.timeline.has_gradient(number) for number in outside)

    def owns(self, name: str) -> bool:
        """Return whether a tensor, by its name, is of one of the stage's blocks."""
        return any(name == block or name.startswith((f"{block}.", f"{block} ")) for block in self.timeline.blocks)

    def keeps(self, term: Term) -> bool:
        """Return whether a term is there because of this stage: it is of its blocks, or a gradient of the rest."""
        return self.owns(term.name) or (term.category == "gradients" and self.uses_rest)

    def span(self, way: TurnWay | Literal["update", "steady"]) -> range:
        """Return the positions of the moments between which such a turn lies."""
        at = self.timeline.at
        middle = at("backward", "weights")
        ways = {
            "forward": (at("forward"), at("backward")),
            "backward": (at("backward"), at("update")),
            "inputs": (at("backward"), middle),
            "weights": (middle, at("update")),
            "update": (at("update"), at("steady")),
            "steady": (at("steady"), len(self.timeline.moments)),
        }
        return range(*ways[way])

    def kept_at(self, way: TurnWay, micro: int) -> int:
        """Return the bytes that a microbatch keeps until such a turn of it begins."""
        tick = self.activations.moments[self.span(way)[0]][0]
        return int(self.activations.levels(micro)[tick])


@dataclass(frozen=True)
class PieceTurn:
    """State of a step in which a rank takes up a microbatch in one of its stages."""

    way: TurnWay | Literal["update", "steady"]
    place: int
    """Place of the stage among those of the rank."""

    states: tuple[TurnOfStep, ...]
    """State of each stage: microbatches in flight, and those that have ended."""


@dataclass(frozen=True)
class PlannedPieces:
    """Stages of a rank, and the order in which it runs microbatches through them."""

    schedule: PipelineSchedule
    ranks: int
    rank: int
    pieces: Sequence[StagePiece]

    def turns(self, microbatches: int, micro: int) -> Mapping[PieceTurn, int]:
        """Return the different states of a step, each with the most bytes that other microbatches keep in it."""
        counts = [_Counts(piece, micro) for piece in self.pieces]
        fullest: dict[PieceTurn, int] = {}
        for stage, turn in order_of_rank(self.schedule, self.ranks, self.rank, microbatches, len(self.pieces)):
            place, way = stage // self.ranks, turn.way
            counts[place].begin(way)
            phase: PredictedPhase = "forward" if way == "forward" else "backward"
            states = tuple(each.state(phase if each is counts[place] else "forward", microbatches) for each in counts)
            now = PieceTurn(way, place, states)
            fullest[now] = max(fullest.get(now, 0), sum(each.kept for each in counts))
            counts[place].end(way)
        return fullest

    def between_steps(self, microbatches: int) -> Iterator[PieceTurn]:
        """Yield the states behind the last microbatch."""
        states = tuple(TurnOfStep("update", 0, microbatches - 1) for _ in self.pieces)
        place = next((place for place, piece in enumerate(self.pieces) if piece.uses_rest), 0)
        yield PieceTurn("update", place, states)
        yield PieceTurn("steady", place, states)

    def terms(self, turn: PieceTurn, microbatches: int, kept: int, micro: int) -> Iterator[Term]:
        """Yield what a rank holds of other microbatches, and what torch does."""
        received = microbatches * sum(_bytes(piece.received, micro) for piece in self.pieces)
        yield Term("communication", "buffers for what other stages send", received)
        if kept:
            yield Term("activations", "other microbatches", kept)
        if turn.way in ("update", "steady") and self.schedule == "zerobubble":
            back = microbatches * sum(_bytes(piece.sent_back, micro) for piece in self.pieces)
            yield Term("communication", "gradients for the stages before", back)


class _Counts:
    """Microbatches of one stage by what they have done."""

    def __init__(self, piece: StagePiece, micro: int) -> None:
        self._sizes: dict[str, int] = {"waiting": 0, "begun": 0}
        self._sizes["forwarded"] = piece.kept_at("backward", micro)
        self._sizes["halved"] = piece.kept_at("weights", micro)
        self._sizes["ended"] = _bytes(piece.sent_on, micro) + _bytes(piece.sent_back, micro)
        self._numbers = dict.fromkeys(self._sizes, 0)
        self._after: Literal["", "forward", "backward"] = ""

    def begin(self, way: TurnWay) -> None:
        """Take a microbatch out of those that wait for this turn."""
        before = {"forward": "waiting", "weights": "halved"}.get(way, "forwarded")
        self._numbers[before] -= 1

    def end(self, way: TurnWay) -> None:
        """Put the microbatch among those that wait for the next."""
        self._numbers[{"forward": "forwarded", "inputs": "halved"}.get(way, "ended")] += 1
        self._after = "forward" if way == "forward" else "backward"

    @property
    def kept(self) -> int:
        """Bytes."""
        return sum(self._numbers[state] * size for state, size in self._sizes.items())

    def state(self, phase: PredictedPhase, microbatches: int) -> TurnOfStep:
        """Return what the stage has done, as far as it makes a difference for what a backend holds."""
        ended = self._numbers["ended"]
        if ended == microbatches:
            return TurnOfStep("update", 0, microbatches - 1)
        if 0 < ended < microbatches - 1:
            ended = 1
        in_flight = self._numbers["forwarded"] + self._numbers["halved"]
        return TurnOfStep(phase, min(in_flight, 1), ended, self._after, told=True)


def predict_piece_peaks(
    planned: PlannedPieces,
    timeline: StepTimeline,
    predict: Callable[[int | None, StepTimeline], Prediction],
    micro: int,
    *,
    staged: bool,
) -> list[PredictedPeak]:
    """Return the peak of each phase of a step of a rank.

    `timeline`: that of the whole rank. `predict` tells what a backend holds beside the activations, in a stage by its
    place; None: of the whole rank. `staged`: collectives copy what they send.
    """
    count = timeline.microbatches
    if not staged:
        pieces = [replace(piece, activations=piece.activations.without_copies) for piece in planned.pieces]
        planned = replace(planned, pieces=pieces)
    fullest: dict[PredictedPhase, PredictedPeak] = {}
    last = dict.fromkeys(planned.between_steps(count), 0)
    for turn, kept in {**planned.turns(count, micro), **last}.items():
        piece, span = planned.pieces[turn.place], planned.pieces[turn.place].span(turn.way)
        now = _timeline(piece, count, turn.states[turn.place])
        own = predict(turn.place, now).terms
        named = {term.name for term in own if term.category == "gradients" and _is_there(term, span[0])}
        more = [*planned.terms(turn, count, kept, micro)]
        for place, (other, state) in enumerate(zip(planned.pieces, turn.states, strict=True)):
            if place != turn.place:
                at = other.span(
                    "steady" if turn.way == "steady" else "update" if state.phase == "update" else "forward"
                )[0]
                resting = predict(place, _timeline(other, count, state)).terms
                there = [replace(term, first=0, until=None) for term in resting if _is_there(term, at)]
                more += [t for t in there if other.keeps(t) and (other.owns(t.name) or t.name not in named)]
        (peak,) = peaks_between([span], now, Prediction((*own, *more)), piece.activations, micro, count)
        if peak.phase not in fullest or peak.peak > fullest[peak.phase].peak:
            fullest[peak.phase] = peak
    return [*built_peak(predict(None, timeline)), *fullest.values()]


def _timeline(piece: StagePiece, microbatches: int, turn: TurnOfStep) -> StepTimeline:
    return replace(piece.timeline, microbatches=microbatches, turn=turn)


def _is_there(term: Term, at: int) -> bool:
    return term.first <= at and (term.until is None or term.until > at)


def _bytes(line: Line, micro: int) -> int:
    base, slope = line
    return round(base + slope * micro)
