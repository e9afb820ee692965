"""`JobSystem`: base class of what starts processes on several machines, such as Slurm; lookup by name."""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar

from unipar.config.config import Config
from unipar.config.sections.machines import Machines
from unipar.config.sections.section import Section
from unipar.errors import ConfigError
from unipar.utils.entry_points import PluginGroup

O = TypeVar("O", bound=Section)  # noqa: E741 - short, as other type variables


@dataclass(frozen=True, kw_only=True)
class NewJob:
    """A command of unipar that is to run on several machines."""

    name: str
    """Name of the run folder."""

    command: str
    """run, compare, scale or verify."""

    file: Path
    """Path of the config, absolute."""

    arguments: tuple[str, ...]
    """Arguments after the config, without --out."""

    out: Path
    """Path of the run folder, absolute."""

    folder: Path
    """Folder for what is written at the submission, absolute."""

    config: Config
    nodes: int

    per: int | None
    """Ranks on each machine; None: one for each of its GPUs, which the job counts (`counts_gpus`)."""

    @property
    def ranks(self) -> int:
        """Number of ranks on all machines, for job systems that do not count GPUs."""
        assert self.per is not None
        return self.nodes * self.per

    @property
    def machines(self) -> Machines:
        """Section `machines` of the config."""
        return self.config.machines or Machines()

    @property
    def gpus(self) -> int:
        """GPUs that each machine needs: one for each rank, unless the config says cpu, or one GPU for all."""
        if self.config.device == "cpu":
            return 0
        return self.ranks // self.nodes if ":" not in self.config.device else 1

    def words(self, file: str, out: str) -> list[str]:
        """Return the command line after `python -m unipar`, with these paths of config and run folder."""
        return [self.command, file, *self.arguments, "--out", out]


@dataclass(frozen=True, kw_only=True)
class SubmittedJob:
    """A job that was handed over, as submitted.json holds it."""

    system: str
    id: str
    """Name or number that the job system gave it."""

    command: str
    file: str
    nodes: int
    per: int | None
    """Ranks on each machine; None: one for each of its GPUs."""

    submitted: float
    """Time in seconds since 1970."""

    folder: str
    """Folder with what was written, absolute."""

    host: str = ""
    """Name of the machine on which it was handed over."""

    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Options of the job system; names of secrets, and no values."""


class JobSystem(ABC, Generic[O]):
    """Base class of job systems. Name a subclass in the entry-point group `unipar.machines`."""

    name: ClassVar[str]
    """Name in `machines.on`; its options are in the section `machines.NAME`."""

    options: ClassVar[type[Section]]
    """Keys of that section."""

    clients: ClassVar[tuple[str, ...]]
    """Programs that hand a job over, and ask for its state; they must be on PATH."""

    remedy: ClassVar[str]
    """Way to get them, as the end of a sentence."""

    prints_id: ClassVar[bool] = True
    """Whether the command that hands a job over ends at once; if not, it runs as long as the job."""

    counts_gpus: ClassVar[bool] = False
    """Whether a job counts the GPUs of its machines when it starts, so that `machines.ranks_per_node` can be left
    open."""

    final_states: ClassVar[frozenset[str]] = frozenset()
    """States that a job never leaves. They are kept: job systems forget their jobs, some within minutes."""

    def __init__(self, chosen: O) -> None:
        self.chosen = chosen

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Self:
        """Return the job system with these options, which are valid."""
        return cls(cls.options.model_validate(options, strict=False))  # type: ignore[arg-type]

    def why_missing(self) -> str:
        """Return why nothing can be handed over from this machine, or ""."""
        absent = [name for name in self.clients if shutil.which(name) is None]
        return f"{', '.join(absent)} not found here: {self.remedy}" if absent else ""

    def refuse(self, job: NewJob) -> Iterator[str]:
        """Yield each reason why this job cannot be handed over, with the way out."""
        yield from ()

    @abstractmethod
    def texts(self, job: NewJob) -> dict[str, str]:
        """Return the files to be written to the job's folder, by name."""

    @abstractmethod
    def hand_over(self, job: NewJob) -> list[str]:
        """Return the command that hands the job over when the files are written."""

    def hand_over_input(self, job: NewJob) -> str | None:
        """Return what that command reads from its standard input: secrets, where it takes them so."""
        return None

    @abstractmethod
    def id_of(self, job: NewJob, output: str) -> str:
        """Return the job's name or number, from what the command printed."""

    @abstractmethod
    def state(self, job: SubmittedJob) -> str:
        """Return how the job stands, in the job system's own words and lower case."""

    @abstractmethod
    def logs(self, job: SubmittedJob, *, follow: bool) -> list[str]:
        """Return the command that prints what the job has printed, and with `follow` what it goes on to print."""

    @abstractmethod
    def cancel(self, job: SubmittedJob) -> list[str]:
        """Return the command that ends the job."""


JOB_SYSTEMS = PluginGroup[type[JobSystem[Any]]](
    "unipar.machines",
    "job system",
    "machines.on: {}",
    "a subclass of unipar.config.job_system.JobSystem",
    JobSystem,
    ConfigError,
    are_classes=True,
)


def job_system_names() -> list[str]:
    """Return the names of all job systems that are installed."""
    return JOB_SYSTEMS.names()


@cache
def find_job_system(name: str) -> type[JobSystem[Any]]:
    """Return the job system of that name; its clients may be missing."""
    return JOB_SYSTEMS.find(name)
