"""What a world is asked to do: runs, one after another, each with a new engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, Literal, Self

from unipar.settled import SettledConfig

ENTRY: Final = "unipar.proof.inside:run"
JOBS: Final = "jobs.json"


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run of some steps."""

    name: str
    kind: Literal["run", "replay", "look"]
    """A run as anyone's; a replay, in one process, of what `ranks` ranks do; a look at the task alone."""

    settled: SettledConfig
    steps: int
    ranks: int = 1
    order: str = "shares"
    apart: bool = False
    """A replay keeps each microbatch's share of the gradient."""

    trace_at: int | None = None
    """The step whose every module is recorded."""

    calm: bool = True
    """Dropout is set to 0."""

    def to_json(self) -> dict[str, Any]:
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "settled"}
        return plain | {"config": self.settled.config.written(), "settled": self.settled.to_json()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        plain = {key: value for key, value in data.items() if key not in ("config", "settled")}
        return cls(**plain, settled=SettledConfig.from_json(data["config"], data["settled"]))


def result_of(folder: Path, job: int, rank: int) -> Path:
    return folder / f"job-{job}-rank-{rank}.pt"
