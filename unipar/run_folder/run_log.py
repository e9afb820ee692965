"""Run log of a rank: its events as JSON lines."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from unipar.utils.files import write_file_atomically

_ENDS = ("stopped", "end")
"""Events with which a run ends."""


class RunLog:
    """File of a rank's events, one JSON object a line; events are appended."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def note(self, event: str, **fields: Any) -> None:
        """Append an event with the current time and further fields."""
        row = {"event": event, "time": time.time(), **{name: _finite_or_none(value) for name, value in fields.items()}}
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()

    def continue_after(self, step: int, **fields: Any) -> None:
        """Go on in the run log of an earlier attempt: what it says of later steps, and of its end, is dropped.

        `fields`: what the line about this says besides the step.
        """
        path = Path(self._file.name)
        self._file.close()
        RunLog.trim(path, step)
        self._file = path.open("a", encoding="utf-8")
        self.note("continued", step=step, **fields)

    @staticmethod
    def trim(path: Path, step: int) -> None:
        """Drop from a run log what it says of steps after `step`, and of the run's end; after step 0, everything."""
        rows = [row for row in RunLog.read(path) if step and row.get("step", 0) <= step and row["event"] not in _ENDS]
        write_file_atomically(path, "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows))

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @staticmethod
    def read(path: Path) -> Iterator[dict[str, Any]]:
        """Yield the events of a run log file; an unfinished last line is left out."""
        if not path.exists():
            return
        for line in path.read_text("utf-8").splitlines(keepends=True):
            if line.endswith("\n"):
                yield json.loads(line)

    @staticmethod
    def whole(path: Path) -> bool:
        """Return whether the last line of a run log file is finished; a rank that was killed may leave part of one."""
        return path.read_bytes()[-1:] in (b"", b"\n")


def _finite_or_none(value: Any) -> Any:
    """Return None for NaN and infinity, which JSON cannot hold, and any other value unchanged."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
