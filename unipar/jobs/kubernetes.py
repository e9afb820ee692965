"""Kubernetes: one YAML file with a TrainJob, JobSet, Job, PyTorchJob or MPIJob."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import yaml
from pydantic import Field
from typing_extensions import override

from unipar.config.job_system import JobSystem, NewJob, SubmittedJob
from unipar.config.sections.section import Section
from unipar.jobs.client import ask_client
from unipar.jobs.kubernetes_objects import (
    ObjectKind,
    PodSettings,
    kubernetes_objects,
    longest_name,
    pods_of,
    resource_name,
)


class KubernetesOptions(Section):
    """Config section `machines.kubernetes`."""

    kind: ObjectKind = "trainjob"
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

    mount_path: str = "/out"
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


_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")

SECONDS_TO_CLOSE = 30
"""Seconds that a pod has besides launch.shutdown_timeout, for what follows the last step."""


class Kubernetes(JobSystem[KubernetesOptions]):
    """Kubernetes, through kubectl."""

    name = "kubernetes"
    options = KubernetesOptions
    clients = ("kubectl",)
    remedy = "install it, and let it reach the cluster (`kubectl auth can-i create jobs`), or write files with --print"
    final_states = frozenset({"complete", "succeeded", "failed"})

    @override
    def refuse(self, job: NewJob) -> Iterator[str]:
        chosen, restarts, section = self.chosen, job.config.launch.restarts, "machines.kubernetes"
        if not chosen.image:
            yield f"{section}.image: name the container image that holds unipar, the libraries and the task's code"
        yield from self._refuse_names(job)
        for variable, reference in chosen.secrets.items():
            if not re.fullmatch(r"[a-z0-9][-.a-z0-9]*/[-._a-zA-Z0-9]+", reference):
                yield f"{section}.secrets.{variable}: wanted name/key of a secret, as my-secret/key, got {reference!r}"
        if not job.file.is_relative_to(Path.cwd()):
            yield (
                f"{job.file} is not below the working directory, which {section}.code ({chosen.code}) stands for: "
                "submit from a folder above the config"
            )
        if restarts and chosen.kind != "jobset":
            yield (
                f"launch.restarts: {restarts}, and a {chosen.kind} is not started again as a whole: set {section}.kind "
                "to jobset, which counts restarts, or launch.restarts to 0"
            )
        elif restarts and chosen.claim is None and job.config.resume != "never":
            yield (
                f"launch.restarts: {restarts}, and the run folder goes with the pods: name a volume for it in "
                f"{section}.claim"
            )

    def _refuse_names(self, job: NewJob) -> Iterator[str]:
        """Yield a sentence for each name that Kubernetes does not take, with one that it would take."""
        chosen = self.chosen
        longest = longest_name(chosen.kind, job.nodes)
        names = {"name": (self._name(job), longest), "namespace": (chosen.namespace, 63), "claim": (chosen.claim, 63)}
        for key, (name, length) in names.items():
            if name is None or (len(name) <= length and _NAME.fullmatch(name)):
                continue
            wrong = (
                f"has {len(name)} characters, and so that its pods can have names, {length} are the most"
                if len(name) > length
                else "may hold only a-z, 0-9 and -, begin with a letter, and not end with -"
            )
            yield f"machines.kubernetes.{key}: {name!r} {wrong}: write {_likely_name(name, length)}"

    def _name(self, job: NewJob) -> str:
        return self.chosen.name or job.name.replace("_", "-").lower()

    @override
    def texts(self, job: NewJob) -> dict[str, str]:
        chosen, restarts = self.chosen, job.config.launch.restarts
        more = ["--set", "resume=auto"] if restarts and job.config.resume is None else []
        at = PurePosixPath(chosen.mount_path)
        words = [*job.words(str(job.file.relative_to(Path.cwd())), str(at / job.name)), *more]
        pods = PodSettings(
            name=self._name(job),
            nodes=job.nodes,
            per=job.ranks // job.nodes,
            image=chosen.image or "",
            code=shlex.quote(chosen.code),
            before=job.machines.setup,
            command=shlex.join(["-m", "unipar", *words]),
            python=shlex.quote(chosen.python),
            grace=math.ceil(job.config.launch.shutdown_timeout) + SECONDS_TO_CLOSE,
            restarts=restarts,
            seconds=None if job.machines.time is None else math.ceil(job.machines.time),
            limits={**chosen.resources, **({chosen.gpu: job.gpus} if job.gpus else {})},
            shm=chosen.shm,
            claim=chosen.claim,
            at=chosen.mount_path,
            secrets=chosen.secrets,
            runtime=chosen.runtime,
            labels=chosen.labels,
        )
        objects = kubernetes_objects(chosen.kind, pods)
        return {"job.yaml": yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, width=120)}

    @override
    def hand_over(self, job: NewJob) -> list[str]:
        return [*self._kubectl(), "apply", "-f", str(job.folder / "job.yaml")]

    @override
    def id_of(self, job: NewJob, output: str) -> str:
        return self._name(job)

    def _kubectl(self) -> list[str]:
        return ["kubectl", *(["--namespace", self.chosen.namespace] if self.chosen.namespace else [])]

    @override
    def state(self, job: SubmittedJob) -> str:
        path = "{range .status.conditions[?(@.status=='True')]}{.type}{'\\n'}{end}"
        asked = [*self._kubectl(), "get", resource_name(self.chosen.kind), job.id, "--ignore-not-found"]
        conditions = ask_client([*asked, "--output", f"jsonpath={path}"]).split()
        if conditions:
            return conditions[-1].lower()
        return "created" if ask_client([*asked, "--output", "name"]).strip() else "unknown to the cluster"

    @override
    def logs(self, job: SubmittedJob, *, follow: bool) -> list[str]:
        wanted = ["--selector", pods_of(self.chosen.kind, job.id), "--prefix", "--tail=-1", "--max-log-requests=100"]
        return [*self._kubectl(), "logs", *wanted, *(["--follow"] if follow else [])]

    @override
    def cancel(self, job: SubmittedJob) -> list[str]:
        return [*self._kubectl(), "delete", "-f", f"{job.folder}/job.yaml", "--wait=false"]


def _likely_name(name: str, longest: int) -> str:
    """Return a name that Kubernetes takes, as much like this one as can be."""
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "run"
    plain = plain if plain[0].isalpha() else f"run-{plain}"
    return plain[:longest].rstrip("-")


class _Dumper(yaml.SafeDumper):
    """Writer of YAML: scripts of several lines as they are, lists indented."""

    @override
    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        return super().increase_indent(flow, False)

    @override
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _write_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _write_text)
