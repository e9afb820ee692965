"""Kubernetes: one YAML file with a TrainJob, JobSet, Job, PyTorchJob or MPIJob."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from unipar.config.job_system import JobSystem
from unipar.config.sections.section import Section


class KubernetesOptions(Section):
    """Config section `machines.kubernetes`."""

    kind: Literal["trainjob", "jobset", "job", "pytorchjob", "mpijob"] = "trainjob"
    """Kind of object. trainjob: Kubeflow Trainer; jobset: JobSet; job: no operator, an indexed Job with a Service;
    pytorchjob, mpijob: Kubeflow's Training Operator 1."""

    image: str | None = None
    """Container image with unipar, the libraries and the task's code."""

    name: str | None = None
    """Name of the object; null: that of the run folder, with - instead of _."""

    namespace: str | None = None
    """Namespace of the object; null: the one that kubectl uses."""

    runtime: str = "torch-distributed"
    """Training runtime of a TrainJob."""

    code: str = "/code"
    """Folder in the image that holds what the working directory holds here; FILE is looked for in it."""

    claim: str | None = None
    """PersistentVolumeClaim for run folders; null: they are in the pods, and go with them."""

    at: str = "/out"
    """Folder in the pods where the claim is mounted."""

    secrets: dict[str, str] = Field(default_factory=dict)
    """Variables with secrets, from the cluster's own: {WANDB_API_KEY: my-secret/key}."""

    resources: dict[str, str] = Field(default_factory=dict)
    """Resources of each pod besides its GPUs, as Kubernetes writes them: {cpu: "8", memory: 64Gi}."""

    gpu: str = "nvidia.com/gpu"
    """Resource that a GPU is, one for each rank."""

    shm: str = "16Gi"
    """Most memory that /dev/shm may take."""

    python: str = "python"
    """Interpreter in the image."""

    labels: dict[str, str] = Field(default_factory=dict)
    """Labels of the object, such as {kueue.x-k8s.io/queue-name: research}."""


class Kubernetes(JobSystem):
    """Kubernetes, through kubectl."""

    name = "kubernetes"
    options = KubernetesOptions
