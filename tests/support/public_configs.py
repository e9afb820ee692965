"""Shapes of public configs of DeepSpeed, Accelerate and trainers: keys and values, and the file that has them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_FILE = Path(__file__).parents[1] / "conversion/public_configs.jsonl"
SEEDS = {1: "20261125", 2: "20261126"}
"""Seed of each lot of files, by which a third of them was set aside before any of them was imported.

Lot 3 was set aside whole: its files were first imported after what the others showed was mended.
"""


def set_aside(source: str, lot: int) -> bool:
    """Return whether a file belongs to the part of its lot that was opened once, at the end."""
    if lot not in SEEDS:
        return True
    digest = hashlib.sha256(f"{SEEDS[lot]} {source}".encode()).hexdigest()
    return int(digest, 16) % 3 == 0


def read_shapes(lot: int) -> list[tuple[str, str, dict[str, Any]]]:
    """Return the source, the kind (`ds`, `accelerate` or `args`) and the mapping of each file of a lot."""
    rows = [json.loads(line) for line in _FILE.read_text(encoding="utf-8").splitlines()]
    return [(row["from"], row["kind"], _nest(row["keys"])) for row in rows if row.get("lot", 1) == lot]


def _nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *above, last = path.split("/")
        into = tree
        for name in above:
            into = into.setdefault(name, {})
        into[last] = value
    return tree
