"""Jobs of a world: runs, one after another, each with a new engine; and the keys that name runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final, Literal, Self

from typing_extensions import override

from unipar.config import Precision
from unipar.config.settled import SettledConfig
from unipar.utils.text import count_of

JOBS_ENTRY: Final = "unipar.verification.worker.entry:run_world_jobs"
"""Entry of the worker processes."""

JOBS_FILE_NAME: Final = "jobs.json"
"""Name of the file that tells a world its jobs."""


@dataclass(frozen=True)
class RunKey:
    """Key of a run of a verification; its text names the run on the terminal, in errors and in verify.json."""

    kind: Literal["probe", "kernels", "one process", "shares", "micros", "strategy"]
    """Kind of run; kernels: a search for operations without a deterministic kernel on the device; shares and micros: a
    replay in one process that adds share by share, or microbatch by microbatch."""

    strategy: str = ""
    """Strategy that is run, if kind is strategy."""

    precision: Precision | None = None
    """Precision of the run, if it is not that of the config."""

    micro: int | None = None
    """Samples in a microbatch, if not as many as in the config."""

    bitwise: bool = False
    """Whether the arithmetic does not depend on how tensors are split, so that results can be equal bit for bit."""

    perturbed: bool = False
    """Whether the initial weights are changed in the last place, which shows how the task amplifies rounding."""

    step: int | None = None
    """Last step of a replay, which is traced in full; None: all steps, without a trace."""

    shares: int | None = None
    """Shares of each batch that a replay adds up; None: as many as in the strategies that split it into most shares."""

    tensor: int = 1
    """Parts in which a replay adds up each matrix product, as ranks that split matrices do."""

    context: int = 1
    """Parts in which a replay adds up over positions, as ranks that split sequences do."""

    dropout: bool = False
    """Whether dropout is on: it is set to 0 in all other runs."""

    repeat: int = 0
    """Number of the repeat of a run that need not give the same bits; 0: the first."""

    choices: bool = False
    """Whether choices of routers are recorded, in a replay, or followed where they are near-ties, in a strategy."""

    half: Literal["", "first", "second"] = ""
    """first: the run saves its state halfway and ends; second: it goes on from what another one saved."""

    @override
    def __str__(self) -> str:
        if self.kind == "probe":
            return "task probe"
        if self.kind == "kernels":
            return "search for operations without a deterministic kernel"
        if self.kind == "strategy":
            halves = {"": "", "first": ", first half, saved", "second": ", second half, resumed"}
            return self.strategy + (
                ", bitwise"
                if self.bitwise
                else ", with dropout"
                if self.dropout
                else ", with the experts of one process"
                if self.choices
                else halves[self.half]
            )
        if self.kind == "one process":
            micro = "" if self.micro is None else f", microbatches of {self.micro}"
            micro += f", repeat {self.repeat}" if self.repeat else ""
            return f"one process{micro}" + (f", {self.precision}" if self.precision else "")
        replay = "a replay" if self.shares is None else f"a replay with {count_of(self.shares, 'share')}"
        dropout = ", with dropout" if self.dropout else ""
        perturbed = ", weights changed in the last place" if self.perturbed else ""
        if self.step is not None:
            return f"{replay} up to step {self.step}" + (f", {self.precision}" if self.precision else "") + perturbed
        order = "share by share" if self.kind == "shares" else "microbatch by microbatch"
        how = "" if self.bitwise else f", {self.precision or 'as configured'}"
        parts = f", matrix products in {self.tensor} parts" if self.tensor > 1 else ""
        parts += f", sequences in {self.context} parts" if self.context > 1 else ""
        choices = ", choices of routers recorded" if self.choices else ""
        return f"{replay}, {order}{how}{parts}{dropout}{perturbed}{choices}"


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run of a number of steps."""

    key: RunKey
    kind: Literal["run", "replay", "probe", "kernels"]
    """run: a usual run; replay: one process that does what several ranks do; probe: the probe of the task alone;
    kernels: a run of which only the operations without a deterministic kernel are kept."""

    settled: SettledConfig
    steps: int
    shares: int = 1
    """Shares of each batch that a replay adds up: each is what one rank, or several that share the work, train on."""

    order: str = "shares"
    """Order in which a replay adds gradients: shares or micros."""

    per_microbatch: bool = False
    """Whether a replay keeps each microbatch's share of the gradient."""

    saves_in: str = ""
    """Folder in which the run saves its state after its last step; "": it does not."""

    resumes: str = ""
    """Checkpoint from which the run goes on; "": it begins anew."""

    follows: str = ""
    """File of choices that the run takes where those of its routers are near-ties; "": it takes its own."""

    trace_at: int | None = None
    """Step in which every module is traced; None: no step."""

    may_fail: bool = False
    """Whether an error of the task is a result, `unable`, and not the end of the world: in fp64, or with other sizes of
    a microbatch than the config's."""

    def to_json(self) -> dict[str, Any]:
        """Return all fields as JSON, and the run's name for readers of the file."""
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("key", "settled")}
        settled = {"config": self.settled.config.json_for_ranks(), "settled": self.settled.to_json()}
        return {"name": str(self.key), "key": asdict(self.key)} | plain | settled

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Return the job that `to_json` wrote."""
        plain = {key: value for key, value in data.items() if key not in ("name", "key", "config", "settled")}
        settled = SettledConfig.from_json(data["config"], data["settled"])
        return cls(**plain, key=RunKey(**data["key"]), settled=settled)


def job_result_path(folder: Path, job: int, rank: int) -> Path:
    """Return the path of a rank's result of the job of this number."""
    return folder / f"job-{job}-rank-{rank}.pt"
