"""Peak of each phase of a step, from what the model allocates and from the terms of a backend."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from unipar.backend import Category
from unipar.planning.activations import Activations
from unipar.prediction.timeline import (
    MemoryPlace,
    Payload,
    PredictedPhase,
    Prediction,
    StepTimeline,
    Term,
)

MOST_GLOO_SCRATCH: Final = 2 * 2**20
"""Most bytes that gloo allocates for one sum, beside copies: two segments of at most 1 MiB."""

OUTSIDE_DEVICE: Final[tuple[MemoryPlace, ...]] = ("host", "disk")
"""Places other than the device's memory."""

LATE_MOMENTS: Final = 16
"""Moments of a step, of which each module has about two, after which gloo has freed what it sent."""


@dataclass(frozen=True)
class PredictedPeak:
    """Memory of one rank at the fullest moment of a phase, as predicted."""

    phase: PredictedPhase
    peak: int
    held: dict[Category, int]
    """Bytes by category; their sum is the peak."""

    terms: tuple[Term, ...]
    """What is there at that moment, the largest first."""


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


def predict_offloaded(timeline: StepTimeline, prediction: Prediction) -> Iterator[OffloadedBytes]:
    """Yield what lies on the host and on the disk; nothing where there is nothing."""
    for place in OUTSIDE_DEVICE:
        terms, last = prediction.at(place), len(timeline.moments)
        if terms:
            fullest = int(np.argmax(_held_in_spans(terms, last)))
            there = [t for t in terms if t.first <= fullest and (t.until is None or t.until > fullest)]
            yield OffloadedBytes(place, tuple(sorted(there, key=lambda t: -t.size)))


def predict_peaks(
    timeline: StepTimeline, prediction: Prediction, activations: Activations, micro: int, accumulate: int = 1
) -> list[PredictedPeak]:
    """Return the peak of each phase of a step with so many microbatches of so many samples, all of which it holds.

    Before them comes the set-up ("built"), if the backend tells what it holds.
    """
    phases: dict[PredictedPhase, list[int]] = {}
    for position, moment in enumerate(timeline.moments):
        phases.setdefault(moment.phase, []).append(position)
    found = built_peak(prediction)
    return found + peaks_between([*phases.values()], timeline, prediction, activations, micro, accumulate)


def peaks_between(
    spans: Sequence[Sequence[int]],
    timeline: StepTimeline,
    prediction: Prediction,
    activations: Activations,
    micro: int,
    accumulate: int = 1,
) -> list[PredictedPeak]:
    """Return the peaks of parts of phases, each given by the positions of its moments."""
    terms, levels, totals = _totals_in_spans(timeline, prediction, activations, micro, accumulate)
    found: list[PredictedPeak] = []
    ticks = [*(tick for tick, _ in activations.moments), activations.ticks]
    for positions in spans:
        at = positions[int(np.argmax(totals[positions]))]
        tick = ticks[at] + int(np.argmax(levels[ticks[at] : ticks[at + 1]]))
        found.append(_peak_at(timeline.moments[at].phase, at, tick, terms, activations, micro))
    return found


def predict_peak(
    timeline: StepTimeline, prediction: Prediction, activations: Activations, micro: int, accumulate: int = 1
) -> int:
    """Return the largest peak of a step, without what it consists of."""
    step = int(np.max(_totals_in_spans(timeline, prediction, activations, micro, accumulate)[2]))
    return max(step, *(peak.peak for peak in built_peak(prediction)), 0)


def predict_needed(
    timeline: StepTimeline, prediction: Prediction, activations: Activations, micro: int, accumulate: int = 1
) -> int:
    """Return the bytes in which a step fits though gloo, on the CPU, frees late what it has sent.

    A thread of gloo lets go of it after the training goes on, when the next tensors may be there; and it has scratch
    memory. At each moment one such copy is counted, the largest of those that were freed shortly before.
    """
    terms, _, totals = _totals_in_spans(timeline, prediction, activations, micro, accumulate)
    late = np.zeros_like(totals)
    for term in terms:
        if term.category == "communication" and term.until is not None:
            after = np.arange(term.until, term.until + LATE_MOMENTS) % len(late)  # also in the next step
            late[after] = np.maximum(late[after], term.size)
    step = int(np.max(totals + late)) + activations.largest_staged(micro) + _gloo_scratch(prediction.sent)
    return max(step, *(peak.peak for peak in built_peak(prediction)), 0)


def built_peak(prediction: Prediction) -> list[PredictedPeak]:
    """Return the peak before the first step, if a backend tells it."""
    if not prediction.built:
        return []
    held = Counter[Category]()
    for term in prediction.built:
        held[term.category] += term.size
    terms = tuple(sorted(prediction.built, key=lambda term: -term.size))
    return [PredictedPeak("built", sum(held.values()), dict(held), terms)]


def late_bytes(prediction: Prediction, activations: Activations, micro: int) -> int:
    """Return the bytes that gloo frees late, at most, whenever that is."""
    sent = [t.size for t in prediction.terms if t.category == "communication" and t.until is not None]
    return max(*sent, activations.largest_staged(micro), 0) + _gloo_scratch(prediction.sent)


def _gloo_scratch(sent: Sequence[Payload]) -> int:
    """Return the scratch memory of the largest sum: two of the segments into which gloo cuts it, two for each rank."""
    return min(max((p.size // p.ranks for p in sent), default=0), MOST_GLOO_SCRATCH)


def _totals_in_spans(
    timeline: StepTimeline, prediction: Prediction, activations: Activations, micro: int, accumulate: int
) -> tuple[Sequence[Term], Any, Any]:
    """Return a backend's terms with the batch, bytes allocated at each tick, and peaks between moments."""
    base, slope = activations.batch
    batch = accumulate * round(base + slope * micro)
    batches = [Term("activations", "batch", batch, timeline.at("forward"))] if batch else []
    terms = (*prediction.at("device"), *batches)
    levels = activations.levels(micro)
    ticks = [tick for tick, _ in activations.moments]
    return terms, levels, _held_in_spans(terms, len(ticks)) + np.maximum.reduceat(levels, ticks)


def _held_in_spans(terms: Sequence[Term], spans: int) -> Any:
    """Return the bytes of a backend's terms between each moment and the next."""
    changes = np.zeros(spans + 1)
    for term in terms:
        if term.until is not None and term.until <= term.first:
            continue  # no moment lies between
        changes[term.first] += term.size
        if term.until is not None:
            changes[term.until] -= term.size
    return np.cumsum(changes)[:-1]


def _peak_at(
    phase: PredictedPhase, position: int, tick: int, terms: Sequence[Term], activations: Activations, micro: int
) -> PredictedPeak:
    there = [t for t in terms if t.first <= position and (t.until is None or t.until > position)]
    for block in activations.alive(tick):
        category: Category = "activations" if activations.outlives_its_phase(block) else "temporaries"
        name = f"{block.operation} in {block.where}" if block.where else block.operation
        if size := block.size(micro):
            there.append(Term(category, name, size))
    held = Counter[Category]()
    for term in there:
        held[term.category] += term.size
    return PredictedPeak(phase, sum(held.values()), dict(held), tuple(sorted(there, key=lambda t: -t.size)))
