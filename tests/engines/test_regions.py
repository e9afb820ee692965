"""Regions of tensors: boxes cut into runs, sketches and hashes of parts that add up to those of the whole."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from unipar.backend import Region
from unipar.engines.fingerprint import TensorSketcher, hash_tensor_region, sketch_whole_tensor
from unipar.engines.state import box_regions

Box = tuple[slice, ...]


def regions(shape: tuple[int, ...], box: Box) -> list[Region]:
    return list(box_regions(shape, [at.start for at in box], [at.stop - at.start for at in box]))


@pytest.mark.parametrize(
    ("shape", "box", "expected"),
    [
        ((), (), [Region(0, 1)]),
        ((6,), (slice(2, 5),), [Region(2, 3)]),
        ((6, 4), (slice(2, 5), slice(0, 4)), [Region(8, 12)]),
        ((6, 4), (slice(0, 6), slice(1, 3)), [Region(1, 2, 4, 6)]),
        ((6, 4), (slice(2, 4), slice(2, 4)), [Region(10, 2, 4, 2)]),
        ((6, 4), (slice(2, 3), slice(2, 4)), [Region(10, 2)]),
        ((2, 3, 4), (slice(0, 2), slice(1, 2), slice(0, 4)), [Region(4, 4, 12, 2)]),
        ((2, 3, 4), (slice(0, 2), slice(1, 3), slice(1, 2)), [Region(5, 1, 4, 2), Region(17, 1, 4, 2)]),
        ((3, 2), (slice(3, 3), slice(0, 2)), [Region(0, 0)]),
    ],
    ids=[
        "a scalar",
        "a range",
        "rows",
        "columns",
        "a corner",
        "part of one row",
        "one row of each matrix",
        "part of rows of each matrix",
        "nothing",
    ],
)
def test_a_box_as_runs(shape: tuple[int, ...], box: Box, expected: list[Region]) -> None:
    """As few regions as there can be, in row-major order."""
    assert regions(shape, box) == expected


def test_regions_have_the_elements_of_their_box() -> None:
    """In the order of the box; every box of a tensor of three dimensions, also one that begins within its storage."""
    whole = torch.arange(10 + 2 * 3 * 4)[10:].view(2, 3, 4)
    edges = [[slice(a, b) for a in range(n) for b in range(a + 1, n + 1)] for n in whole.shape]
    for box in product(*edges):
        parts = [where.of(whole) for where in regions((2, 3, 4), box)]
        assert torch.cat([part.flatten() for part in parts]).tolist() == whole[box].flatten().tolist(), box
        assert sum(where.numel for where in regions((2, 3, 4), box)) == whole[box].numel()


def test_a_region_is_a_view() -> None:
    """Writing into it writes into the tensor."""
    whole = torch.zeros(2, 3)
    Region(1, 1, 3, 2).of(whole).fill_(7)
    assert whole.tolist() == [[0, 7, 0], [0, 7, 0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_marks_of_parts_add_up(dtype: torch.dtype) -> None:
    """Columns and the rest, in any cut; a part in the wrong place has another mark."""
    whole = torch.randn(5, 6, dtype=dtype, generator=torch.Generator().manual_seed(0))
    left, right = (regions((5, 6), (slice(0, 5), at)) for at in (slice(0, 2), slice(2, 6)))
    hashes = [hash_tensor_region(where.of(whole), where) for where in (*left, *right)]
    assert sum(hashes) % 2**64 == hash_tensor_region(whole, Region(0, 30))
    misplaced = hash_tensor_region(left[0].of(whole), Region(0, 10))
    assert (misplaced + hashes[1]) % 2**64 != hash_tensor_region(whole, Region(0, 30))


def test_sketches_of_parts_add_up() -> None:
    """The sketch of a tensor is the sum of those of its columns."""
    whole = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
    sketches = TensorSketcher()

    def part(columns: slice) -> Tensor:
        (where,) = regions((5, 6), (slice(0, 5), columns))
        return sketches.sketch_region("w", 30, where, where.of(whole))

    expected = sketch_whole_tensor(sketches, "w", whole)
    assert torch.allclose(part(slice(0, 2)) + part(slice(2, 6)), expected, rtol=0, atol=1e-12)
    assert not torch.allclose(part(slice(0, 2)), expected, rtol=0, atol=1e-3)
