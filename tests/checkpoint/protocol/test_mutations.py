"""Damaged and forged checkpoints: every one is refused."""

from __future__ import annotations

from pathlib import Path

from tests.support.checkpoint_mutations import MUTATIONS, play_mutations


def test_every_mutation_is_refused(tmp_path: Path) -> None:
    """Six of each kind, with a fixed seed; `make chaos` plays sixty."""
    rows = play_mutations(tmp_path, 6, seed=1)
    assert len(rows) == len(MUTATIONS) == 39
    assert [(name, trials, refused) for name, trials, refused, _ in rows if refused != 6] == []
