"""`PlannedMemory`: memory of one rank in a step, from what the model allocates and from the terms of a backend."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Literal

import numpy as np

from unipar.backend import Category
from unipar.planning.activations import Activations
from unipar.planning.pipeline_order import TurnWay
from unipar.prediction.timeline import MemoryPlace, PredictedPhase, Prediction, StepTimeline, Term

OUTSIDE_DEVICE: Final[tuple[MemoryPlace, ...]] = ("host", "disk")
"""Places other than the device's memory."""

StepSpan = TurnWay | Literal["update", "steady"]
"""Part of a step: a turn with a microbatch, or what comes behind the last of them."""

PHASES: Final[tuple[StepSpan, ...]] = ("forward", "backward", "update", "steady")
"""Spans that are a whole step of one microbatch."""


def positions_of(timeline: StepTimeline, span: StepSpan) -> range:
    """Return the positions of the moments in a part of a step."""
    at, middle = timeline.at, timeline.at("backward", "weights")
    bounds: dict[StepSpan, tuple[int, int]] = {
        "forward": (at("forward"), at("backward")),
        "backward": (at("backward"), at("update")),
        "inputs": (at("backward"), middle),
        "weights": (middle, at("update")),
        "update": (at("update"), at("steady")),
        "steady": (at("steady"), len(timeline.moments)),
    }
    return range(*bounds[span])


@dataclass(frozen=True)
class PredictedPeak:
    """Memory of one rank at the fullest moment of a phase, as predicted."""

    phase: PredictedPhase
    peak: int
    held: dict[Category, int]
    """Bytes by category; their sum is the peak."""

    terms: tuple[Term, ...]
    """Blocks that are there at that moment, the largest first."""

    @classmethod
    def of(cls, phase: PredictedPhase, terms: Sequence[Term]) -> PredictedPeak:
        """Return the peak that consists of these terms."""
        held = Counter[Category]()
        for term in terms:
            held[term.category] += term.size
        return cls(phase, sum(held.values()), dict(held), tuple(sorted(terms, key=lambda term: -term.size)))


@dataclass(frozen=True)
class OffloadedBytes:
    """Memory that one rank keeps outside of its device, at the fullest moment of a step."""

    place: MemoryPlace
    terms: tuple[Term, ...]
    """Tensors there, the largest first."""

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(term.size for term in self.terms)


def predict_offloaded(
    timeline: StepTimeline, prediction: Prediction, activations: Sequence[Term] = ()
) -> Iterator[OffloadedBytes]:
    """Yield what lies on the host and on the disk; nothing where there is nothing. `activations`: those on the host."""
    for place in OUTSIDE_DEVICE:
        if terms := (*prediction.at(place), *(term for term in activations if term.place == place)):
            fullest = int(np.argmax(_bytes_of_terms(terms, len(timeline.moments))))
            there = [term for term in terms if term.is_there(fullest)]
            yield OffloadedBytes(place, tuple(sorted(there, key=lambda term: -term.size)))


def built_peak(prediction: Prediction) -> list[PredictedPeak]:
    """Return the peak of the set-up before the first step ("built"), if the backend has terms for it."""
    return [PredictedPeak.of("built", prediction.built)] if prediction.built else []


@dataclass(frozen=True)
class PlannedMemory:
    """Memory of one rank while a microbatch runs: terms of a backend, and all batches of the step beside them."""

    timeline: StepTimeline
    prediction: Prediction
    activations: Activations
    micro: int
    """Samples of a microbatch."""

    accumulate: int = 1
    """Number of microbatches of the step, all of which the rank holds."""

    def peaks(self, spans: Sequence[StepSpan] = PHASES) -> Iterator[PredictedPeak]:
        """Yield the peak of each of these parts of the step."""
        ticks = [*self._ticks, self.activations.ticks]
        for positions in (positions_of(self.timeline, span) for span in spans):
            at = positions[int(np.argmax(self.totals[positions]))]
            tick = ticks[at] + int(np.argmax(self._levels[ticks[at] : ticks[at + 1]]))
            terms = (term for term in self.terms if term.is_there(at))
            yield PredictedPeak.of(self.timeline.moments[at].phase, [*terms, *self._blocks_at(tick)])

    def highest(self, more: Any = 0) -> int:
        """Return the largest peak of set-up and step, without what it consists of; `more`: bytes at each moment."""
        built = (peak.peak for peak in built_peak(self.prediction))
        return max(int(np.max(self.totals + more)), *built, 0)

    @cached_property
    def terms(self) -> Sequence[Term]:
        """Terms of the backend on the device, and the batches."""
        base, slope = self.activations.batch
        batches = self.accumulate * round(base + slope * self.micro)
        terms = self.prediction.at("device")
        return (*terms, Term("activations", "batch", batches, self.timeline.at("forward"))) if batches else terms

    @cached_property
    def totals(self) -> Any:
        """Most bytes between each moment and the next."""
        return _bytes_of_terms(self.terms, len(self._ticks)) + np.maximum.reduceat(self._levels, self._ticks)

    @cached_property
    def _levels(self) -> Any:
        return self.activations.levels(self.micro)

    @cached_property
    def _ticks(self) -> Sequence[int]:
        return [tick for tick, _ in self.activations.moments]

    def _blocks_at(self, tick: int) -> Iterator[Term]:
        for block in self.activations.alive(tick):
            category: Category = "activations" if self.activations.outlives_its_phase(block) else "temporaries"
            name = f"{block.operation} in {block.where}" if block.where else block.operation
            if size := block.size(self.micro):
                yield Term(category, name, size)


def _bytes_of_terms(terms: Sequence[Term], spans: int) -> Any:
    """Return the bytes of a backend's terms between each moment and the next."""
    changes = np.zeros(spans + 1)
    for term in terms:
        if term.until is not None and term.until <= term.first:
            continue  # no moment lies between
        changes[term.first] += term.size
        if term.until is not None:
            changes[term.until] -= term.size
    return np.cumsum(changes)[:-1]
