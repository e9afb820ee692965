"""Layouts of matrices, and who updates which."""

from __future__ import annotations

from typing import Any

from unipar.optimizers.matrix_parts import MatrixLayout, assign_owners


def _split(shape: tuple[int, int], ranks: int, group: Any) -> MatrixLayout:
    return MatrixLayout(shape, ((0, 1),) * ranks, group)


def test_a_whole_matrix_is_one_range() -> None:
    """A whole matrix has no group, and no rank to wait for."""
    layout = MatrixLayout.whole((3, 4))
    assert (layout.ranges, layout.group) == (((0, 12),), None)


def test_work_is_shared_out() -> None:
    """The largest first, each to the rank with least to do; each group of ranks by itself."""
    one, other = object(), object()
    layouts = [_split((4, 4), 2, one), _split((8, 8), 2, one), _split((4, 4), 2, one), _split((2, 2), 2, other)]
    assert [layout.cost for layout in layouts] == [64, 512, 64, 8]
    assert assign_owners(layouts) == [1, 0, 1, 0]


def test_equal_matrices_go_round() -> None:
    """As ranks count."""
    group = object()
    assert assign_owners([_split((4, 4), 3, group)] * 4) == [0, 1, 2, 0]
