"""Difference between two checkpoints."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from tests.support.checkpoints import floats, pieces_of_rank, save_on_ranks
from unipar.backend import Region
from unipar.checkpoint.overview.checkpoint_difference import TensorDifference, compare_checkpoints
from unipar.checkpoint.protocol.save_checkpoint import PieceToSave
from unipar.checkpoint.protocol.verifying import inspect_checkpoint
from unipar.checkpoint.storage.disk import Disk


def test_two_layouts_of_one_state_are_equal(tmp_path: Path) -> None:
    """Whoever saved which part does not matter."""
    save_on_ranks(tmp_path / "a", 1)
    save_on_ranks(tmp_path / "b", 1, disks=[Disk()], pieces=lambda _, step: pieces_of_rank(0, step, world=1))
    a, b = (inspect_checkpoint(tmp_path / name / "step-00000001") for name in "ab")
    difference = compare_checkpoints(a, b)
    assert not difference.any
    assert difference.text().splitlines()[-1] == "6 tensors equal, 0 tensors differ"


def test_what_differs_is_told(tmp_path: Path) -> None:
    """Largest difference and share of elements, NaN beside NaN as equal; shapes; names; keys of the state."""

    def save(name: str, *values: float, shape: tuple[int, ...], extra: str, strategy: str) -> None:
        def pieces(_rank: int, _step: int) -> Sequence[PieceToSave]:
            return [
                PieceToSave("w", "weight", "F32", (4,), Region(0, 4), floats(*values)),
                PieceToSave("shaped", "weight", "F32", shape, Region(0, 4), floats(1, 2, 3, 4)),
                PieceToSave(extra, "weight", "F32", (1,), Region(0, 1), floats(1)),
            ]

        save_on_ranks(tmp_path / name, 1, disks=[Disk()], pieces=pieces, state={"strategy": strategy, "time": 0})

    save("a", 1, math.nan, 3, 4, shape=(4,), extra="old", strategy="native")
    save("b", 1, math.nan, 3.5, 4, shape=(2, 2), extra="new", strategy="single")
    a, b = (inspect_checkpoint(tmp_path / name / "step-00000001") for name in "ab")
    difference = compare_checkpoints(a, b)
    assert difference.any
    shapes = "F32 of shape [4] in a, F32 of shape [2, 2] in b"
    assert difference.tensors == (
        TensorDifference(name="shaped", kind="weight", said=shapes),
        TensorDifference(name="w", kind="weight", largest=0.5, differing=1, elements=4),
    )
    assert difference.text(width=100).splitlines()[2:] == [
        "",
        "name    kind    largest  differ  elements",
        f"shaped  weight  {shapes}",
        "w       weight      0.5    25 %         4",
        "",
        "only in a: old (weight)",
        "only in b: new (weight)",
        "state.json: strategy: 'native' in a, 'single' in b",
        "0 tensors equal, 2 tensors differ",
    ]


def test_a_number_beside_nan_differs_without_bound(tmp_path: Path) -> None:
    """NaN on one side only is no small difference."""
    for name, value in (("a", math.nan), ("b", 1.0)):
        piece = PieceToSave("w", "weight", "F32", (1,), Region(0, 1), floats(value))
        save_on_ranks(tmp_path / name, 1, disks=[Disk()], pieces=lambda _r, _s, piece=piece: [piece])
    a, b = (inspect_checkpoint(tmp_path / name / "step-00000001") for name in "ab")
    (found,) = compare_checkpoints(a, b).tensors
    assert (found.largest, found.differing) == (math.inf, 1)
