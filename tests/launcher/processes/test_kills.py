"""A few of the kills that `make chaos` does many of."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.kills import kill_a_rank, kill_the_parent


@pytest.mark.parametrize("seed", [101, *(pytest.param(seed, marks=pytest.mark.sweep) for seed in (100, 103))])
def test_a_rank_is_killed(tmp_path: Path, seed: int) -> None:
    """All ends within 5 s, nothing is left, and the error names the rank."""
    kill_a_rank(tmp_path, seed)


@pytest.mark.parametrize("seed", [pytest.param(100, marks=pytest.mark.sweep), 101, 103])
def test_the_parent_is_killed(tmp_path: Path, seed: int) -> None:
    """All ends within 5 s, and nothing is left."""
    kill_the_parent(tmp_path, seed)
