"""Moments of 8 bits beside those of AdamW: bytes and digits, as a comparison says them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support.short_text import short_text
from unipar.comparison.compare import compare
from unipar.utils.text import parse_bytes

pytestmark = [pytest.mark.forked, pytest.mark.sweep]


def test_bytes_saved_and_digits_lost(tmp_path: Path) -> None:
    """One process runs again with AdamW; a weight keeps 2 bytes and its share of scales instead of 8."""
    task = short_text()
    task["args"] |= {"width": 128, "heads": 2}
    config = {
        "task": task,
        "device": "cpu",
        "parallel": {"data": 2},
        "batch": {"total": 8},
        "train": {"steps": 10, "optimizer": {"name": "adamw-8bit", "block": 128, "lr": 1e-3}},
        "compare": {"repeat": 2},
        "out": str(tmp_path / "out"),
    }
    found = compare(config, cells=("native/nothing",))
    assert found.code == 0
    said = re.fullmatch(
        r"adamw-8bit beside adamw, in one process: optimizer states of (.+) instead of (.+); losses equal to (\d) "
        r"digits over 10 steps",
        found.moments,
    )
    assert said is not None, found.moments
    small, full = (parse_bytes(said[i]) for i in (1, 2))
    assert 0.2 * full < small < 0.35 * full
    assert 1 <= int(said[3]) <= 5
    assert found.moments in found.remarks()
    assert json.loads((tmp_path / "out/compare/compare.json").read_text("utf-8"))["moments"] == found.moments
    assert json.loads((tmp_path / "out/compare-adamw/compare.json").read_text("utf-8"))["cells"][0]["outcome"] == "ran"
