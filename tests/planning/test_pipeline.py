"""Order of microbatches on the stages of a pipeline, and its bubble."""

from __future__ import annotations

import pytest

from unipar.config.sections.cell import PipelineSchedule
from unipar.planning.pipeline import bubble, microbatch_order, microbatches_in_flight


@pytest.mark.parametrize(
    ("schedule", "stage", "order", "in_flight"),
    [
        ("gpipe", 0, "F0 F1 F2 F3 B0 B1 B2 B3", 4),
        ("gpipe", 1, "F0 F1 F2 F3 B0 B1 B2 B3", 4),
        ("1f1b", 0, "F0 F1 F2 B0 F3 B1 B2 B3", 3),
        ("1f1b", 1, "F0 F1 B0 F2 B1 F3 B2 B3", 2),
        ("1f1b", 2, "F0 B0 F1 B1 F2 B2 F3 B3", 1),
    ],
)
def test_order_of_four_microbatches(schedule: PipelineSchedule, stage: int, order: str, in_flight: int) -> None:
    """Three stages; under 1f1b the last one alternates from the beginning."""
    turns = microbatch_order(schedule, 3, stage, 4)
    assert " ".join(f"{turn.way[0].upper()}{turn.micro}" for turn in turns) == order
    assert microbatches_in_flight(turns) == in_flight


def test_fewer_microbatches_than_stages() -> None:
    """Each runs forward and backward once; no more than there are is in flight."""
    turns = microbatch_order("1f1b", 4, 0, 2)
    assert turns == [("forward", 0), ("forward", 1), ("backward", 0), ("backward", 1)]


def test_bubble() -> None:
    """(p-1)/(m+p-1) under 1f1b and gpipe; interleaved shortens it by its chunks."""
    assert bubble("1f1b", 4, 4) == bubble("gpipe", 4, 4) == 3 / 7
    assert bubble("1f1b", 2, 8) == 1 / 9
    assert bubble("interleaved", 4, 4, chunks=2) == 3 / 11
