"""Twenty kills of a random rank, twenty of the parent: `make chaos`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.kills import kill_a_rank, kill_the_parent

pytestmark = pytest.mark.chaos


@pytest.mark.parametrize("seed", range(20))
def test_a_rank_is_killed(tmp_path: Path, seed: int) -> None:
    """All ends within 5 s, and nothing is left."""
    kill_a_rank(tmp_path, seed)


@pytest.mark.parametrize("seed", range(20))
def test_the_parent_is_killed(tmp_path: Path, seed: int) -> None:
    """All ends within 5 s, and nothing is left."""
    kill_the_parent(tmp_path, seed)
