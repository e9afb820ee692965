"""Two thousand damaged and forged checkpoints: `make chaos`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.checkpoint_mutations import play_mutations
from unipar.utils.table import format_table

pytestmark = pytest.mark.chaos

SEED, ROUNDS = 15, 60


def test_two_thousand_mutations_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sixty of each kind; the table says what was tried."""
    rows = play_mutations(tmp_path, ROUNDS, SEED)
    shown = [(name, str(trials), str(refused), f"{took:.1f}") for name, trials, refused, took in rows]
    total = sum(row[1] for row in rows)
    with capsys.disabled():
        header = (f"mutation of a checkpoint, seed {SEED}", "trials", "refused", "seconds")
        print("\n" + format_table(header, shown, right=(1, 2, 3)))
        print(f"{total} mutations, {sum(row[2] for row in rows)} refused")
    assert total >= 2000
    assert sum(row[2] for row in rows) == total
