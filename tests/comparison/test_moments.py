"""Moments of 8 and 16 bits beside those of AdamW, and fp8 beside bf16: bytes and digits, as a comparison says them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.short_text import short_text
from unipar.comparison.compare import compare
from unipar.results.comparison import Comparison
from unipar.utils.text import parse_bytes

pytestmark = [pytest.mark.forked, pytest.mark.sweep]


@pytest.mark.parametrize(
    ("optimizer", "least", "most"),
    [({"name": "adamw-8bit", "block": 128}, 0.2, 0.35), ({"name": "adamw-bf16"}, 0.49, 0.51)],
)
def test_bytes_saved_and_digits_lost(tmp_path: Path, optimizer: dict[str, Any], least: float, most: float) -> None:
    """One process runs again with AdamW; a weight keeps 2 bytes and its share of scales, or 4, instead of 8."""
    task = short_text()
    task["args"] |= {"width": 128, "heads": 2}
    config = {
        "task": task,
        "device": "cpu",
        "parallel": {"data": 2},
        "batch": {"total": 8},
        "train": {"steps": 10, "optimizer": {**optimizer, "lr": 1e-3}},
        "compare": {"repeat": 2},
        "out": str(tmp_path / "out"),
    }
    found = compare(config, strategies=("native/nothing",))
    assert found.code == 0
    said = re.fullmatch(
        rf"{optimizer['name']} beside adamw, in one process: optimizer states of (.+) instead of (.+); losses equal to "
        r"(\d) digits over 10 steps",
        found.moments,
    )
    assert said is not None, found.moments
    small, full = (parse_bytes(said[i]) for i in (1, 2))
    assert least * full < small < most * full
    assert 1 <= int(said[3]) <= 5
    assert found.moments in found.remarks()
    assert json.loads((tmp_path / "out/compare/compare.json").read_text("utf-8"))["moments"] == found.moments
    assert (
        json.loads((tmp_path / "out/compare-adamw/compare.json").read_text("utf-8"))["strategies"][0]["outcome"]
        == "ran"
    )


def test_digits_that_fp8_loses(tmp_path: Path) -> None:
    """One process runs again in bf16-mixed; what multiplies in fp8 is named."""
    config = {
        "task": short_text(),
        "device": "cpu",
        "parallel": {"data": 2},
        "batch": {"total": 8},
        "train": {"steps": 10, "precision": "fp8"},
        "compare": {"repeat": 2},
        "out": str(tmp_path / "out"),
    }
    found = compare(config, strategies=("native/nothing", "deepspeed/parameters"))
    assert isinstance(found, Comparison)
    assert found.code == 0
    said = re.fullmatch(
        r"fp8 \(tensorwise, emulated in fp32\) in 8 of 9 linear layers: layers\.\*\.qkv, layers\.\*\.out, "
        r"layers\.\*\.mlp\.0, layers\.\*\.mlp\.2; in bf16: head \(outside of blocks\); each strategy was checked in "
        r"its first step; fp8 beside bf16-mixed, in one process: losses equal to (\d) digits over 10 steps",
        found.fp8,
    )
    assert said is not None, found.fp8
    assert 2 <= int(said[1]) <= 5
    assert found.fp8 in found.remarks()
    computed = [row.marks.computed for row in found.rows if row.marks is not None]
    assert computed == [("bfloat16 under autocast", "float8_e4m3fn")] * 3
    assert found.forecast is not None
    assert "within 0.00 % of the measured ones" in " ".join(found.remarks())
