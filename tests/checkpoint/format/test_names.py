"""Names of folders, files and keys."""

from __future__ import annotations

import pytest

from unipar.backend import Region
from unipar.checkpoint.format.names import (
    is_shard_name,
    normal_region,
    piece_key,
    piece_shape,
    shard_file_name,
    step_folder_name,
    step_of_folder,
)


@pytest.mark.parametrize(("step", "name"), [(0, "step-00000000"), (42, "step-00000042"), (10**9, "step-1000000000")])
def test_a_step_and_its_folder(step: int, name: str) -> None:
    """One name for each step, which sorts as numbers do up to eight digits."""
    assert step_folder_name(step) == name
    assert step_of_folder(name) == step


@pytest.mark.parametrize(
    "name",
    [
        "step-42",
        "step-0000000042",
        "step-0000004x",
        "step-00000042\n",
        "xstep-00000042",
        "step-٠٠٠٠٠٠٤٢",
        ".tmp-step-00000042-ab",
    ],
)
def test_other_names_are_no_steps(name: str) -> None:
    """Two names never mean the same step."""
    assert step_of_folder(name) is None


def test_shards_have_names_by_rank() -> None:
    """A rank's first shard, its second, and names that lead elsewhere."""
    assert shard_file_name(7) == "shards/rank-00007.safetensors"
    assert shard_file_name(7, 1) == "shards/rank-00007-001.safetensors"
    assert is_shard_name("shards/rank-00007.safetensors")
    assert is_shard_name("shards/rank-00007-001.safetensors")
    for name in ("shards/../rank-00007.safetensors", "rank-00007.safetensors", "shards/rank-00007.safetensors\n"):
        assert not is_shard_name(name)


@pytest.mark.parametrize(
    ("given", "normal", "shape", "key"),
    [
        (Region(0, 12), Region(0, 12), (3, 4), "weight:w"),
        (Region(0, 4, 4, 3), Region(0, 12), (3, 4), "weight:w"),
        (Region(4, 4, 9, 1), Region(4, 4), (4,), "weight:w:4"),
        (Region(1, 2, 4, 3), Region(1, 2, 4, 3), (3, 2), "weight:w:1"),
    ],
)
def test_a_piece_of_a_matrix(given: Region, normal: Region, shape: tuple[int, ...], key: str) -> None:
    """A whole tensor keeps its shape; other pieces have one row for each run."""
    assert normal_region(given) == normal
    assert piece_shape((3, 4), normal) == shape
    assert piece_key("w", "weight", normal, (3, 4)) == key
