"""Ray: a job that runs a TorchTrainer, whose workers are the ranks."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from unipar.config.job_system import JobSystem
from unipar.config.sections.section import Section


class RayOptions(Section):
    """Config section `machines.ray`."""

    address: str | None = None
    """Address of the cluster's dashboard, such as http://head:8265; null: RAY_ADDRESS, or this machine."""

    storage: str | None = None
    """Folder or address that all machines reach, where Ray Train keeps its own state; null: ~/ray_results on each."""

    resources: dict[str, float] = Field(default_factory=dict)
    """Resources of each rank besides its GPU: {CPU: 4}."""

    secrets: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Names of variables with secrets, such as WANDB_API_KEY: they go with the submission, no file holds them."""

    python: str = "python"
    """Interpreter on the cluster's head that runs the job."""


class Ray(JobSystem):
    """Ray, through `ray job`."""

    name = "ray"
    options = RayOptions
