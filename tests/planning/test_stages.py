"""States of a step in which a stage of a pipeline is fullest."""

from __future__ import annotations

from unipar.planning.pipeline_stages import PlannedStage
from unipar.prediction.timeline import TurnOfStep


def test_turns_of_1f1b() -> None:
    """The first of two stages: with one more in flight it is fullest; behind a backward FSDP2 gathers otherwise."""
    stage = PlannedStage("1f1b", 2, 0, (0.0, 8.0), (0.0, 8.0))
    assert stage.turns(2) == [
        TurnOfStep("forward", 0, 0),
        TurnOfStep("forward", 1, 0, "forward"),
        TurnOfStep("backward", 1, 0, "forward"),
        TurnOfStep("backward", 0, 1, "backward"),
        TurnOfStep("update", 0, 1),
    ]


def test_turns_of_the_last_stage() -> None:
    """The last stage has nothing in flight; of equal states one is enough, that with most gradients sent back."""
    stage = PlannedStage("1f1b", 2, 1, (0.0, 0.0), (0.0, 8.0))
    assert stage.turns(4) == [
        TurnOfStep("forward", 0, 0),
        TurnOfStep("backward", 0, 0, "forward"),
        TurnOfStep("forward", 0, 2, "backward"),
        TurnOfStep("backward", 0, 2, "forward"),
        TurnOfStep("forward", 0, 3, "backward"),
        TurnOfStep("backward", 0, 3, "forward"),
        TurnOfStep("update", 0, 3),
    ]


def test_what_lies_between_turns() -> None:
    """Microbatches in flight, two gradients that may be under way, and what a loop still refers to."""
    stage = PlannedStage("gpipe", 2, 0, (0.0, 8.0), (4.0, 0.0))
    assert dict(stage.between(TurnOfStep("forward", 3, 0), 100, 2)) == {
        "microbatches in flight": 300,
        "gradients sent back": 0,
    }
    assert dict(stage.between(TurnOfStep("forward", 1, 5), 100, 2)) == {
        "microbatches in flight": 100,
        "gradients sent back": 8,
        "output of the microbatch before, its gradient and input": 36,
    }
