"""Regions of saved tensors, read into tensors of an engine's own: whole, in parts, in the middle of others."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest
import torch

from tests.support.checkpoints import save_two_steps
from unipar.backend import Region
from unipar.checkpoint.format.manifest import StoredTensor
from unipar.checkpoint.protocol.verifying import verify_checkpoint
from unipar.checkpoint.saved_state import SavedState, refuse_other_model
from unipar.errors import CheckpointError

MATRIX = [float(i) for i in range(1, 25)]
"""Elements of the matrix of 4 x 6 of step 1, whose columns two ranks have saved."""


@pytest.fixture
def saved(tmp_path: Path) -> Generator[SavedState]:
    path, _ = save_two_steps(tmp_path)
    with SavedState(path, verify_checkpoint(path).manifest) as state:
        yield state


REGIONS = [
    Region(0, 24),
    Region(0, 6),
    Region(4, 15),
    Region(7, 2),
    Region(2, 2, 6, 4),
    Region(3, 3, 6, 4),
    Region(6, 18),
]


@pytest.mark.parametrize("where", REGIONS)
@pytest.mark.parametrize("offset", [0, 5])
def test_a_region_is_read_into_the_middle_of_a_buffer(saved: SavedState, where: Region, offset: int) -> None:
    """Libraries keep parameters as views of one buffer: what is beside a view stays as it was."""
    buffer = torch.full((40,), -1.0)
    saved.fill(buffer[offset : offset + where.numel], "net.weight", "weight", where)
    wanted = where.of(torch.tensor(MATRIX)).flatten().tolist()
    assert buffer.tolist() == [-1.0] * offset + wanted + [-1.0] * (40 - offset - where.numel)
    assert saved("net.weight", "weight", where).tolist() == wanted


def test_a_tensor_of_another_layout_or_dtype(saved: SavedState) -> None:
    """A transposed tensor gets the elements in its own order, one of fp64 their values."""
    transposed = torch.zeros(6, 4).t()
    saved.fill(transposed, "net.weight", "weight", Region(0, 24))
    assert transposed.flatten().tolist() == MATRIX
    precise = torch.zeros(24, dtype=torch.float64)
    saved.fill(precise, "net.weight", "weight", Region(0, 24))
    assert precise.tolist() == MATRIX


def test_what_is_not_saved(saved: SavedState) -> None:
    """A name that is not there, and elements beyond the end."""
    with pytest.raises(CheckpointError) as lacks:
        saved("net.weight", "moment", Region(0, 1))
    assert str(lacks.value) == f"{saved.folder} has no moment of net.weight"
    with pytest.raises(CheckpointError) as beyond:
        saved("net.weight", "weight", Region(20, 6))
    assert str(beyond.value).startswith(f"{saved.folder}: ")
    assert str(beyond.value).endswith(" has 4 of the 6 elements that are asked for")


def test_another_dtype_is_refused() -> None:
    """A tensor that is saved in other numbers than the model's is named with both; nothing is cast in silence."""
    there = {("w", "weight"): StoredTensor("w", "weight", "F32", (2, 3), ())}
    with pytest.raises(CheckpointError) as caught:
        refuse_other_model({("w", "weight"): ((2, 3), "BF16")}, there, "checkpoint here")
    assert str(caught.value) == "checkpoint here: w (weight) is F32, in the model BF16"
