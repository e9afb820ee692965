"""Config section `machines`: where a run's processes are to be started, if not on this machine alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, PositiveInt

from unipar.config.sections.duration import Seconds
from unipar.config.sections.section import Section


class Machines(Section):
    """Config section `machines`; the options of each job system are in a section of its name, such as `slurm`."""

    model_config = ConfigDict(extra="allow")

    on: str | None = None
    """Job system that `unipar submit` hands the run to: slurm, kubernetes, ray, mpi, or a plugin; `--on` wins."""

    nodes: PositiveInt = 1
    """Number of machines."""

    ranks_per_node: PositiveInt | Literal["auto"] = "auto"
    """Ranks on each machine. auto: the world (parallel.data x axes) divided by nodes; with data auto, under Slurm, one
    for each GPU of a machine."""

    time: Seconds | None = None
    """Time after which the job system ends the job, in seconds or as 2h; null: its own limit."""

    folder: Literal["auto", "shared", "own"] = "auto"
    """Whether all machines see the same run folder. auto: found by looking when the ranks meet."""

    interface: str | None = None
    """Network interface over which ranks on different machines talk, such as ib0; null: that of the route to rank 0."""

    setup: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Shell lines that run on each machine before the ranks start, such as `module load CUDA/12`."""

    @property
    def options(self) -> Mapping[str, Any]:
        """Sections of job systems as they were given, by name; not validated."""
        return self.__pydantic_extra__ or {}
