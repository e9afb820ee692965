"""Open MPI: one mpirun command that starts the ranks over ssh, for a few machines without a queue."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from unipar.config.job_system import JobSystem
from unipar.config.sections.section import Section

_Names = Annotated[tuple[str, ...], Field(strict=False)]


class MpiOptions(Section):
    """Config section `machines.mpi`."""

    hosts: _Names = ()
    """Names or addresses of the machines, which ssh reaches without a password; rank 0 is on the first."""

    address: str | None = None
    """Address of the first machine at which the others reach it; null: its name in `hosts`."""

    port: Annotated[int, Field(ge=1024, le=65535)] = 29400
    """Port on the first machine where the ranks meet."""

    secrets: _Names = ()
    """Names of variables with secrets, such as WANDB_API_KEY: mpirun passes their values on, no file holds them."""

    python: str | None = None
    """Interpreter on the machines; null: the one that submits."""

    more: _Names = ()
    """Further options of mpirun, such as `--mca btl_tcp_if_include eth0`, one word each."""


class Mpi(JobSystem):
    """Open MPI, through mpirun."""

    name = "mpi"
    options = MpiOptions
