"""A tracker from outside the tree: a line a step, in a file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from typing_extensions import override

import unipar


class Lines(unipar.Tracker):
    @override
    def __init__(self, run: Path, config: Mapping[str, Any]) -> None:
        self._file = (run / "lines.txt").open("w", encoding="utf-8")
        self._file.write(f"total {config['batch']['total']}\n")

    @override
    def write(self, step: int, named: Mapping[str, float]) -> None:
        self._file.write(f"{step} {sorted(named)}\n")

    @override
    def close(self) -> None:
        self._file.close()
