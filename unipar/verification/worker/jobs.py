"""What a world is asked to do: runs, one after another, each with a new engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final, Literal, Self

from typing_extensions import override

from unipar.config import Precision
from unipar.config.settled import SettledConfig

JOBS_ENTRY: Final = "unipar.verification.worker.entry:run_world_jobs"
JOBS_FILE_NAME: Final = "jobs.json"


@dataclass(frozen=True)
class RunKey:
    """Which run of a verification this is. Its text names it on the terminal, in errors and in verify.json."""

    kind: Literal["look", "one process", "shares", "micros", "cell"]
    """shares, micros: a replay in one process, its sums added rank by rank or microbatch by microbatch."""

    cell: str = ""
    """The cell that is run, where kind is cell."""

    precision: Precision | None = None
    """None: that of the config."""

    micro: int | None = None
    """Samples in a microbatch; None: as many as in the config."""

    bitwise: bool = False
    """With arithmetic that does not depend on how tensors are split, so that bits can be compared."""

    step: int | None = None
    """A replay up to this step, which is recorded in full; None: all steps."""

    @override
    def __str__(self) -> str:
        if self.kind == "look":
            return "a look at the task"
        if self.kind == "cell":
            return f"bits of {self.cell}" if self.bitwise else self.cell
        if self.kind == "one process":
            micro = "" if self.micro is None else f", microbatches of {self.micro}"
            return f"one process{micro}" + (f", {self.precision}" if self.precision else "")
        if self.step is not None:
            return f"step {self.step} " + (f"in {self.precision}" if self.precision else "again")
        order = "share by share" if self.kind == "shares" else "microbatch by microbatch"
        how = "" if self.bitwise else f", {self.precision or 'as configured'}"
        return f"a replay, {order}{how}"


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run of some steps."""

    key: RunKey
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
        """Return all fields, and a name for one who reads the file."""
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("key", "settled")}
        told = {"config": self.settled.config.json_for_ranks(), "settled": self.settled.to_json()}
        return {"name": str(self.key), "key": asdict(self.key)} | plain | told

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        plain = {key: value for key, value in data.items() if key not in ("name", "key", "config", "settled")}
        settled = SettledConfig.from_json(data["config"], data["settled"])
        return cls(**plain, key=RunKey(**data["key"]), settled=settled)


def job_result_path(folder: Path, job: int, rank: int) -> Path:
    return folder / f"job-{job}-rank-{rank}.pt"
