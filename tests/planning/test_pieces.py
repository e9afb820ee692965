"""Peaks of a rank with two stages of a pipeline: what other microbatches and the other stage keep."""

from __future__ import annotations

from collections.abc import Mapping

from unipar.config.sections.strategy import PipelineSchedule
from unipar.planning.activations import Activations, AllocatedBlock
from unipar.planning.interleaved_peaks import PlannedPieces, StagePiece, predict_piece_peaks
from unipar.prediction.timeline import Moment, PredictedParameter, Prediction, StepTimeline, Term

FORWARDED, HALVED, ENDED = 10, 16, 6
"""Bytes that a microbatch of one sample keeps: after its forward, after the backward of inputs, and until the end."""


def piece_of(block: str) -> StagePiece:
    moments = (
        Moment("forward", "begin"),
        Moment("backward", "begin"),
        Moment("backward", "weights"),
        Moment("backward", "gradient", 0, 0),
        Moment("backward", "finish"),
        Moment("update", "begin"),
        Moment("steady", "begin"),
    )
    saved = AllocatedBlock(0.0, 10.0, "mm", block, born=1, died=4)
    between = AllocatedBlock(6.0, 0.0, "mm", "", born=3, died=4)
    line = (0.0, 0.0)
    activations = Activations((saved, between), tuple(zip((0, 2, 4, 5, 6, 7, 8), moments, strict=True)), line, line)
    weight = PredictedParameter(f"{block}.weight", (25,), 4, trained=True, block=0)
    timeline = StepTimeline((weight,), {"mask": 8}, (block,), moments)
    return StagePiece(timeline, activations, sent_on=(4.0, 0.0), sent_back=(0.0, 2.0), received=(1.0, 2.0))


def planned(schedule: PipelineSchedule, rank: int) -> PlannedPieces:
    return PlannedPieces(schedule, 2, rank, [piece_of("layers.1"), piece_of("layers.10")])


def predict(place: int | None, timeline: StepTimeline) -> Prediction:
    """Return a parameter of each stage, its gradient from the first one on, and the model's buffer."""
    since, name = 0 if timeline.accumulates else timeline.gradient_at(0), timeline.parameters[0].name
    gradient = Term("gradients", name, 100, since, timeline.at("steady"))
    return Prediction((Term("parameters", name, 100), gradient, Term("buffers", "mask", 8)))


def test_what_other_microbatches_keep() -> None:
    """zerobubble on the second of two ranks: gradients of weights wait, and with them all that they need."""
    turns = planned("zerobubble", 1).turns(2, 1)
    assert [(turn.way, turn.place, kept) for turn, kept in turns.items()] == [
        ("forward", 0, 0),
        ("forward", 0, FORWARDED),
        ("forward", 1, 2 * FORWARDED),
        ("inputs", 1, 2 * FORWARDED),
        ("forward", 1, 2 * FORWARDED + HALVED),
        ("inputs", 1, 2 * FORWARDED + HALVED),
        ("weights", 1, 2 * FORWARDED + HALVED),
        ("inputs", 0, FORWARDED + HALVED + ENDED),
        ("weights", 1, FORWARDED + HALVED + ENDED),
        ("inputs", 0, HALVED + 2 * ENDED),
        ("weights", 0, HALVED + 2 * ENDED),
        ("weights", 0, 3 * ENDED),
    ]


def test_equal_states_of_a_long_step() -> None:
    """Of states that differ in nothing that a backend asks for, the fullest is enough: 256 turns are few of them."""
    turns = planned("interleaved", 0).turns(64, 1)
    assert len(turns) == 22
    assert max(turns.values()) == 4 * FORWARDED + 123 * ENDED


def test_peaks_with_the_other_stage() -> None:
    """Parameters and gradients of both stages count, the model's buffers once, torch's for each microbatch."""
    held = held_of("zerobubble", 1)
    assert held["steady"] == {"parameters": 200, "buffers": 8, "communication": 2 * 2 * 3 + 2 * 2 * 2}
    assert held["update"] == {**held["steady"], "gradients": 200}
    assert held["backward"] == {
        "parameters": 200,
        "gradients": 200,
        "buffers": 8,
        "communication": 12,
        "activations": FORWARDED + 3 * ENDED,
        "temporaries": HALVED - FORWARDED,
    }


def test_steady_without_halves() -> None:
    """A whole backward leaves no gradient with what a stage got."""
    assert held_of("interleaved", 0)["steady"]["communication"] == 2 * 2 * 3


def held_of(schedule: PipelineSchedule, rank: int) -> Mapping[str, Mapping[str, int]]:
    rank_of_pipeline = planned(schedule, rank)
    timeline = StepTimeline((), {}, (), (), microbatches=2)
    peaks = predict_piece_peaks(
        rank_of_pipeline,
        timeline,
        lambda place, now: Prediction(()) if place is None else predict(place, now),
        1,
        staged=True,
    )
    return {peak.phase: {str(category): size for category, size in peak.held.items()} for peak in peaks}
