"""Peaks of a rank with stages of a pipeline: what other microbatches and other stages keep."""

from __future__ import annotations

from collections.abc import Mapping

from unipar.config.sections.strategy import PipelineSchedule
from unipar.planning.activations import Activations, AllocatedBlock
from unipar.planning.schedule_walk import Line, PlannedRank, PlannedStage, predict_peaks
from unipar.prediction.timeline import Moment, PredictedParameter, Prediction, StepTimeline, Term, TurnOfStep

FORWARDED, HALVED, ENDED = 10, 16, 6
"""Bytes that a microbatch of one sample keeps: after its forward, after the backward of inputs, and until the end."""


def stage_of(block: str) -> PlannedStage:
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
    return PlannedStage(timeline, activations, sent_on=(4.0, 0.0), sent_back=(0.0, 2.0), received=(1.0, 2.0))


def planned(schedule: PipelineSchedule, rank: int) -> PlannedRank:
    whole = PlannedStage(StepTimeline((), {}, (), ()), Activations((), (), (0.0, 0.0), (0.0, 0.0)))
    return PlannedRank(whole, [stage_of("layers.1"), stage_of("layers.10")], schedule, 2, rank)


def predict(stage: PlannedStage, timeline: StepTimeline) -> Prediction:
    """Return a parameter of each stage, its gradient from the first one on, and the model's buffer."""
    if not timeline.parameters:
        return Prediction(())
    since, name = 0 if timeline.accumulates else timeline.gradient_at(0), timeline.parameters[0].name
    gradient = Term("gradients", name, 100, since, timeline.at("steady"))
    return Prediction((Term("parameters", name, 100), gradient, Term("buffers", "mask", 8)))


def test_what_other_microbatches_keep() -> None:
    """zerobubble on the second of two ranks: gradients of weights wait, and with them all that they need."""
    states = planned("zerobubble", 1).states(2, 1)
    assert [(state.spans[0], state.place, sum(term.size for term in kept)) for state, kept in states.items()] == [
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
        ("update", 0, 0),
        ("steady", 0, 0),
    ]


def test_equal_states_of_a_long_step() -> None:
    """Of states that differ in nothing that a backend asks for, the fullest is enough: 256 turns are few of them."""
    states = planned("interleaved", 0).states(64, 1)
    assert len(states) == 22 + 2
    assert max(sum(term.size for term in kept) for kept in states.values()) == 4 * FORWARDED + 123 * ENDED


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
    peaks = predict_peaks(planned(schedule, rank), predict, 1, 2)
    return {peak.phase: {str(category): size for category, size in peak.held.items()} for peak in peaks}


def one_stage(schedule: PipelineSchedule, rank: int, sent_on: Line, sent_back: Line) -> PlannedRank:
    """Return a rank that has one of two stages, in which a microbatch of two samples keeps 100 bytes."""
    moments = (
        Moment("forward", "begin"),
        Moment("backward", "begin"),
        Moment("backward", "finish"),
        Moment("update", "begin"),
        Moment("steady", "begin"),
    )
    saved = AllocatedBlock(0.0, 50.0, "mm", "layers.1", born=1, died=3)
    line = (0.0, 0.0)
    activations = Activations((saved,), tuple(zip((0, 2, 3, 4, 5), moments, strict=True)), line, line)
    timeline = StepTimeline((), {}, ("layers.1",), moments)
    return PlannedRank.alone(PlannedStage(timeline, activations, sent_on, sent_back), schedule, 2, rank)


def test_states_of_1f1b() -> None:
    """The first of two stages: with one more in flight it is fullest; behind a backward FSDP2 gathers otherwise."""
    states = one_stage("1f1b", 0, (0.0, 8.0), (0.0, 0.0)).states(2, 2)
    assert [state.turns for state in states] == [
        (TurnOfStep("forward", 0, 0),),
        (TurnOfStep("forward", 1, 0, "forward"),),
        (TurnOfStep("backward", 1, 0, "forward"),),
        (TurnOfStep("backward", 0, 1, "backward"),),
        (TurnOfStep("update", 0, 1),),
        (TurnOfStep("update", 0, 1),),
    ]


def test_states_of_the_last_stage() -> None:
    """It has nothing in flight; of equal states one is enough, that with most gradients sent back."""
    states = one_stage("1f1b", 1, (0.0, 0.0), (0.0, 8.0)).states(4, 2)
    assert [(state.turns, sum(term.size for term in kept)) for state, kept in states.items()] == [
        ((TurnOfStep("forward", 0, 0),), 0),
        ((TurnOfStep("backward", 0, 0, "forward"),), 0),
        ((TurnOfStep("forward", 0, 1, "backward"),), 2 * 16 + 16),
        ((TurnOfStep("backward", 0, 1, "forward"),), 2 * 16),
        ((TurnOfStep("forward", 0, 3, "backward"),), 2 * 16 + 16),
        ((TurnOfStep("backward", 0, 3, "forward"),), 2 * 16),
        ((TurnOfStep("update", 0, 3),), 0),
        ((TurnOfStep("update", 0, 3),), 0),
    ]


def test_what_lies_between_turns() -> None:
    """Microbatches in flight, two gradients that may be under way, and what a loop still refers to."""

    def kept(schedule: PipelineSchedule, microbatches: int) -> list[dict[str, int]]:
        states = one_stage(schedule, 0, (0.0, 8.0), (4.0, 0.0)).states(microbatches, 2)
        return [{term.name: term.size for term in terms} for terms in states.values()]

    assert {"microbatches in flight": 300} in kept("gpipe", 4)
    assert {
        "microbatches in flight": 100,
        "gradients sent back": 8,
        "output of the microbatch before, its gradient and input": 36,
    } in kept("1f1b", 7)
