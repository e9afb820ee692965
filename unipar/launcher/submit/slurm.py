"""Slurm: one batch script, whose `srun` starts a task for each rank."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from unipar.config.job_system import JobSystem
from unipar.config.sections.section import Section

Names = Annotated[tuple[str, ...], Field(strict=False)]


class SlurmOptions(Section):
    """Config section `machines.slurm`."""

    partition: str | None = None
    """Partition of the job (--partition); null: the cluster's default."""

    account: str | None = None
    """Account that is charged (--account)."""

    qos: str | None = None
    """Quality of service (--qos)."""

    exclusive: bool = False
    """Whether the job has its machines to itself (--exclusive)."""

    environment: Literal["all", "none"] = "all"
    """Variables of the submitting shell that the job gets. all: every one; none: only those in `secrets`."""

    secrets: Names = ()
    """Names of variables with secrets, such as WANDB_API_KEY: Slurm passes their values on, no file holds them."""

    check: bool = True
    """Whether `unipar doctor --across` looks at all machines before the ranks start."""

    python: str | None = None
    """Interpreter on the machines; null: the one that submits."""

    more: Names = ()
    """Further options for the script's #SBATCH lines, such as `--mail-type=END`."""


class Slurm(JobSystem):
    """Slurm, through sbatch, squeue, scontrol and scancel."""

    name = "slurm"
    options = SlurmOptions
