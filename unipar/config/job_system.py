"""`JobSystem`: base class of what starts processes on several machines, such as Slurm; lookup by name."""

from __future__ import annotations

from abc import ABC
from functools import cache
from typing import ClassVar

from unipar.config.sections.section import Section
from unipar.errors import ConfigError
from unipar.utils.entry_points import PluginGroup


class JobSystem(ABC):
    """Base class of job systems. Name a subclass in the entry-point group `unipar.machines`."""

    name: ClassVar[str]
    """Name in `machines.on`; its options are in the section `machines.NAME`."""

    options: ClassVar[type[Section]]
    """Keys of that section."""


JOB_SYSTEMS = PluginGroup[type[JobSystem]](
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
def find_job_system(name: str) -> type[JobSystem]:
    """Return the job system of that name; its client may be missing."""
    return JOB_SYSTEMS.find(name)
