"""Attempts of a run that went on in its folder: their configs, and the step and the error with which they ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from unipar.run_folder.heartbeat import read_heartbeat
from unipar.run_folder.layout import attempts_path, heartbeat_path, run_log_path
from unipar.run_folder.run_log import RunLog


@dataclass(frozen=True)
class Attempt:
    """An earlier attempt of a run, as attempts.jsonl has it."""

    config: Mapping[str, Any]
    launch: Mapping[str, Any]
    step: int
    """Number of the last step that it reached."""

    kind: str
    """Type of the error with which it ended; "" if none was recorded: it was killed, or had done all its steps."""

    message: str

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Self:
        """Return the attempt in a line of attempts.jsonl."""
        ended = row.get("ended", {})
        return cls(
            row["config.json"],
            row["launch.json"],
            int(ended.get("step", 0)),
            str(ended.get("kind", "")),
            str(ended.get("message", "")),
        )

    @property
    def strategy(self) -> str:
        """Strategy that trained."""
        return str(self.launch.get("settled", {}).get("strategy", ""))

    @property
    def ranks(self) -> int:
        """Number of its ranks; 0 if unknown."""
        return int(self.launch.get("ranks", 0))


def read_attempts(run: Path) -> list[Attempt]:
    """Return the earlier attempts of a run, the first one first; none if the run has only one."""
    return [Attempt.of(row) for row in RunLog.read(attempts_path(run))]


def count_attempts(run: Path) -> int:
    """Return the number of earlier attempts of a run."""
    path = attempts_path(run)
    return len(path.read_text("utf-8").splitlines()) if path.exists() else 0


def reached_step(run: Path) -> int:
    """Return the last step that an attempt finished, as far as run log and heartbeat of rank 0 say."""
    logged = max((int(row.get("step", 0)) for row in RunLog.read(run_log_path(run, 0))), default=0)
    beat = read_heartbeat(heartbeat_path(run, 0))
    return max(logged, beat.step - 1 if beat is not None else 0)
