"""Ray: a job that runs a TorchTrainer, whose workers are the ranks."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import Field
from typing_extensions import override

from unipar.config.job_system import JobSystem, NewJob, SubmittedJob
from unipar.config.sections.section import Section
from unipar.jobs.client import ClientFailed, ask_client, unset_variables


class RayOptions(Section):
    """Config section `machines.ray`."""

    address: str | None = None
    """Address of the cluster's dashboard, such as http://head:8265; null: RAY_ADDRESS, or this machine."""

    storage: str | None = None
    """Folder or address that all machines reach, where Ray Train keeps its own state; null: ~/ray_results on each."""

    mount_path: str = "~/unipar-runs"
    """Folder on the machines for run folders."""

    resources: dict[str, float] = Field(default_factory=dict)
    """Resources of each rank besides its GPU: {CPU: 4}."""

    secrets: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Names of variables with secrets, such as WANDB_API_KEY: they go with the submission, no file holds them."""

    python: str = "python"
    """Interpreter on the cluster's head that runs the job."""


_PROGRAM = '''"""Written by unipar submit: a TorchTrainer whose workers are the ranks."""

import os
import sys

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

WORDS = {words}


def rank():
    os.chdir(next(folder for folder in sys.path if os.path.exists(os.path.join(folder, WORDS[1]))))  # the code's
    from unipar.cli.app import main

    sys.argv[:] = ["unipar", *(os.path.expanduser(word) if word.startswith("~/") else word for word in WORDS)]
    try:
        main()
    except SystemExit as e:
        if e.code:
            raise RuntimeError(f"unipar ended with exit code {{e.code}}") from None


TorchTrainer(
    rank,
    torch_config=TorchConfig(backend={backend!r}),
    scaling_config=ScalingConfig(
        num_workers={ranks},
        use_gpu={gpu},
        resources_per_worker={resources},
        placement_strategy={placement!r},
    ),
    run_config=RunConfig(
        name={name!r},
        storage_path={storage!r},
        failure_config=FailureConfig(max_failures={restarts}),
    ),
).fit()
'''

_MODULE = "unipar_ray_job"


class Ray(JobSystem[RayOptions]):
    """Ray, through `ray job`."""

    name = "ray"
    options = RayOptions
    clients = ("ray",)
    remedy = "pip install 'ray[default]' here, of the cluster's version"
    final_states = frozenset({"succeeded", "failed", "stopped"})

    @override
    def refuse(self, job: NewJob) -> Iterator[str]:
        restarts = job.config.launch.restarts
        if not job.file.is_relative_to(Path.cwd()):
            yield (
                f"{job.file} is not below the working directory, which Ray takes to the machines: submit from a "
                "folder above the config"
            )
        if job.machines.time is not None:
            yield "machines.time: Ray ends no job by time; set launch.deadline, which saves and stops, instead"
        if job.machines.setup:
            yield "machines.setup: Ray starts ranks without a shell; put these lines where the cluster is started"
        if restarts and job.nodes > 1 and job.machines.folder != "shared" and not _checkpoints_elsewhere(job):
            yield (
                f"launch.restarts: {restarts}, and a restart may be on other machines than its checkpoints in "
                f"{self.chosen.mount_path}: let all machines see that folder, and say so (machines.folder: shared), or "
                "set checkpoint.to"
            )
        if why := unset_variables(self.chosen.secrets, "machines.ray.secrets"):
            yield why

    @override
    def texts(self, job: NewJob) -> dict[str, str]:
        chosen, restarts = self.chosen, job.config.launch.restarts
        words = job.words(str(job.file.relative_to(Path.cwd())), f"{chosen.mount_path.rstrip('/')}/{job.name}")
        words += ["--set", "resume=auto"] if restarts and job.config.resume is None else []
        program = _PROGRAM.format(
            words=words,
            backend="nccl" if job.gpus else "gloo",
            ranks=job.ranks,
            gpu=bool(job.gpus),
            resources=chosen.resources or None,
            placement="STRICT_SPREAD" if job.nodes > 1 and job.per == 1 else "PACK",
            name=job.name,
            storage=chosen.storage,
            restarts=restarts,
        )
        return {f"{_MODULE}/__main__.py": program, "runtime_env.yaml": self._environment(job)}

    def _environment(self, job: NewJob, secrets: Mapping[str, str] | None = None) -> str:
        """Return the job's environment for Ray: its code, and `secrets` where it is not written to a file."""
        here = Path.cwd()
        excludes = [f"/{job.out.parent.relative_to(here)}/"] if here in job.out.parent.parents else []
        made = {"working_dir": str(here), "excludes": excludes, "py_modules": [str(job.folder / _MODULE)]}
        return yaml.safe_dump(made | ({"env_vars": dict(secrets)} if secrets else {}), sort_keys=False)

    def _ray(self, *words: str) -> list[str]:
        address = ["--address", self.chosen.address] if self.chosen.address else []
        return ["ray", "job", *words[:1], *address, *words[1:]]

    @override
    def hand_over(self, job: NewJob) -> list[str]:
        environment = "/dev/stdin" if self.chosen.secrets else str(job.folder / "runtime_env.yaml")
        wanted = ("--no-wait", "--runtime-env", environment)
        return self._ray("submit", *wanted, "--", self.chosen.python, "-m", _MODULE)

    @override
    def hand_over_input(self, job: NewJob) -> str | None:
        secrets = {name: os.environ[name] for name in self.chosen.secrets}
        return self._environment(job, secrets) if secrets else None

    @override
    def id_of(self, job: NewJob, output: str) -> str:
        match = re.search(r"Job '(\S+)' submitted", output)
        if match is None:
            raise ClientFailed(f"ray job submit: names no job in its answer: {output.strip()}")
        return match[1]

    @override
    def state(self, job: SubmittedJob) -> str:
        output = ask_client(self._ray("status", job.id))
        match = re.search(r"Status for job '\S+': (\w+)|Job '\S+' (?:was )?(\w+)", output)
        return (match[1] or match[2]).lower() if match else "unknown to Ray"

    @override
    def logs(self, job: SubmittedJob, *, follow: bool) -> list[str]:
        return self._ray("logs", *(["--follow"] if follow else []), job.id)

    @override
    def cancel(self, job: SubmittedJob) -> list[str]:
        return self._ray("stop", "--no-wait", job.id)


def _checkpoints_elsewhere(job: NewJob) -> bool:
    """Return whether a restart needs nothing of the run folder: checkpoints are elsewhere, or it begins anew."""
    checkpoint = job.config.checkpoint
    return job.config.resume == "never" or (checkpoint is not None and checkpoint.to is not None)
