"""Objects for Kubernetes: TrainJob, JobSet, Job with Service, PyTorchJob and MPIJob, as plain values for YAML."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

ObjectKind = Literal["trainjob", "jobset", "job", "pytorchjob", "mpijob"]
"""Kinds of objects that can be written."""

Object = dict[str, Any]

PORT = 29400
"""Port of the first pod where torchrun's agents, or the ranks, meet."""

_POD_SUFFIX = "-xxxxx"
_LABEL = "training.kubeflow.org"


@dataclass(frozen=True, kw_only=True)
class PodSettings:
    """Settings that all kinds share: names, sizes, the command of a rank, and what a pod is given."""

    name: str
    nodes: int
    per: int
    image: str
    code: str
    before: tuple[str, ...]

    command: str
    """Command of a rank as a shell's line, without the interpreter: -m unipar run x.yaml."""

    python: str
    grace: int
    restarts: int
    seconds: int | None
    """Seconds after which the job is ended; None: never."""

    limits: Mapping[str, str | int]
    shm: str
    claim: str | None
    at: str
    secrets: Mapping[str, str]
    """Variables with the secret and its key: name/key."""

    runtime: str
    labels: Mapping[str, str]

    def script(self, *lines: str) -> list[str]:
        """Return the command of a container: its code's folder, the lines before, and then these."""
        return ["bash", "-c", "\n".join([f"cd {self.code}", *self.before, *lines])]

    def torchrun(self, options: str = "") -> list[str]:
        """Return the command that starts a pod's ranks."""
        return self.script(
            " ".join(["exec", self.python, "-m", "torch.distributed.run", *options.split(), self.command])
        )

    def static_torchrun(self, first: str) -> list[str]:
        """Return the command that starts a pod's ranks where no operator says who is who: pods are numbered."""
        return self.torchrun(
            f"--nnodes {self.nodes} --nproc-per-node {self.per} --node-rank $JOB_COMPLETION_INDEX "
            f"--master-addr {first} --master-port {PORT}"
        )

    @property
    def environment(self) -> list[Object]:
        """Variables of a container: references to secrets, never values."""
        entries: list[Object] = []
        for name, reference in self.secrets.items():
            secret, _, key = reference.partition("/")
            entries.append({"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}})
        return entries

    @property
    def mounts(self) -> list[Object]:
        """Mounts of a container: shared memory for data workers and NCCL, and the run folders."""
        claim = [{"name": "runs", "mountPath": self.at}] if self.claim else []
        return [{"name": "shm", "mountPath": "/dev/shm"}, *claim]

    @property
    def volumes(self) -> list[Object]:
        """Volumes behind the mounts."""
        claim = [{"name": "runs", "persistentVolumeClaim": {"claimName": self.claim}}] if self.claim else []
        return [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": self.shm}}, *claim]

    def metadata(self, name: str = "") -> Object:
        """Return the metadata of an object."""
        return {"name": name or self.name} | ({"labels": dict(self.labels)} if self.labels else {})

    def pod(self, command: list[str] | None, container: str = "node", **more: Any) -> Object:
        """Return a pod's specification with one container."""
        one: Object = {"name": container, "image": self.image}
        one |= {"command": command} if command else {}
        one |= {"env": self.environment} if self.secrets else {}
        one |= {"resources": {"limits": dict(self.limits)}} if self.limits else {}
        return {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": self.grace,
            **more,
            "containers": [one | {"volumeMounts": self.mounts}],
            "volumes": self.volumes,
        }

    @property
    def deadline(self) -> Object:
        """Time limit, as most kinds write it."""
        return {} if self.seconds is None else {"activeDeadlineSeconds": self.seconds}


def kubernetes_objects(kind: ObjectKind, pods: PodSettings) -> list[Object]:
    """Return the objects of a job, in the order in which they are to be created."""
    return {"trainjob": _trainjob, "jobset": _jobset, "job": _job, "pytorchjob": _pytorchjob, "mpijob": _mpijob}[kind](
        pods
    )


def longest_name(kind: ObjectKind, nodes: int) -> int:
    """Return how long an object's name may be, so that the names of its pods are host names."""
    added = {
        "trainjob": f"-node-0-{nodes - 1}",
        "jobset": f"-node-0-{nodes - 1}",
        "job": f"-{nodes - 1}",
        "pytorchjob": f"-worker-{nodes - 1}",
        "mpijob": f"-worker-{nodes - 1}",
    }[kind]
    return 63 - len(added + _POD_SUFFIX)


def resource_name(kind: ObjectKind) -> str:
    """Return the name by which kubectl knows a kind."""
    return {
        "trainjob": "trainjobs.trainer.kubeflow.org",
        "jobset": "jobsets.jobset.x-k8s.io",
        "job": "jobs.batch",
        "pytorchjob": "pytorchjobs.kubeflow.org",
        "mpijob": "mpijobs.kubeflow.org",
    }[kind]


def pods_of(kind: ObjectKind, name: str) -> str:
    """Return the label that the pods of a job have, those that print what ranks print."""
    return {
        "trainjob": f"jobset.sigs.k8s.io/jobset-name={name}",
        "jobset": f"jobset.sigs.k8s.io/jobset-name={name}",
        "job": f"job-name={name}",
        "pytorchjob": f"{_LABEL}/job-name={name}",
        "mpijob": f"{_LABEL}/job-name={name},{_LABEL}/replica-type=launcher",
    }[kind]


def _trainjob(pods: PodSettings) -> list[Object]:
    """Return a job of Kubeflow Trainer, whose runtime sets the variables that torchrun reads (PET_NNODES, ...)."""
    trainer: Object = {"image": pods.image, "command": pods.torchrun(), "numNodes": pods.nodes}
    trainer |= {"numProcPerNode": pods.per}
    trainer |= {"env": pods.environment} if pods.secrets else {}
    trainer |= {"resourcesPerNode": {"limits": dict(pods.limits)}} if pods.limits else {}
    patch = {
        "terminationGracePeriodSeconds": pods.grace,
        "containers": [{"name": "node", "volumeMounts": pods.mounts}],
        "volumes": pods.volumes,
    }
    patched = {"replicatedJobs": [{"name": "node", "template": {"spec": {"template": {"spec": patch}}}}]}
    spec = {
        "runtimeRef": {"name": pods.runtime},
        "trainer": trainer,
        "runtimePatches": [{"manager": "unipar.io/submit", "trainingRuntimeSpec": {"template": {"spec": patched}}}],
        **pods.deadline,
    }
    return [
        {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "metadata": pods.metadata(), "spec": spec}
    ]


def _indexed(pods: PodSettings, pod: Object) -> Object:
    return {
        "completions": pods.nodes,
        "parallelism": pods.nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        **pods.deadline,
        "template": {"spec": pod},
    }


def _jobset(pods: PodSettings) -> list[Object]:
    """Return a JobSet, which names its pods and, with restarts, creates all of them again."""
    pod = pods.pod(pods.static_torchrun(f"{pods.name}-node-0-0.{pods.name}"))
    spec = {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": {"maxRestarts": pods.restarts},
        "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": _indexed(pods, pod)}}],
    }
    return [{"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": pods.metadata(), "spec": spec}]


def _job(pods: PodSettings) -> list[Object]:
    """Return an indexed Job, and the Service that gives its pods names; no operator is needed."""
    pod = pods.pod(pods.static_torchrun(f"{pods.name}-0.{pods.name}"), subdomain=pods.name)
    return [
        _service(pods, pods.name, {"job-name": pods.name}),
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": pods.metadata(), "spec": _indexed(pods, pod)},
    ]


def _service(pods: PodSettings, name: str, selector: Mapping[str, str]) -> Object:
    """Return a Service without an address of its own: its name means the pods, even before they are ready."""
    spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": dict(selector)}
    return {"apiVersion": "v1", "kind": "Service", "metadata": pods.metadata(name), "spec": spec}


def _replicas(pods: PodSettings, number: int, pod: Object) -> Object:
    return {"replicas": number, "restartPolicy": "Never", "template": {"spec": pod}}


def _run_policy(pods: PodSettings) -> Object:
    return {"backoffLimit": 0, "cleanPodPolicy": "Running", **pods.deadline}


def _pytorchjob(pods: PodSettings) -> list[Object]:
    """Return a PyTorchJob, whose operator sets the variables that torchrun reads."""
    pod = pods.pod(pods.torchrun(), "pytorch")
    workers = {"Worker": _replicas(pods, pods.nodes - 1, pod)} if pods.nodes > 1 else {}
    spec = {
        "nprocPerNode": str(pods.per),
        "runPolicy": _run_policy(pods),
        "pytorchReplicaSpecs": {"Master": _replicas(pods, 1, pod), **workers},
    }
    return [{"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": pods.metadata(), "spec": spec}]


def _mpijob(pods: PodSettings) -> list[Object]:
    """Return an MPIJob, and a Service that is the name of the pod with rank 0."""
    first = f"{pods.name}-worker-0"
    lines = "\n".join([*pods.before, 'exec "$0" "$@"'])
    shell = f"bash -c {shlex.quote(lines)} " if pods.before else ""
    mpirun = (
        f"exec mpirun --allow-run-as-root -np {pods.nodes * pods.per} --bind-to none --wdir {pods.code} "
        f"-x MASTER_ADDR={first} -x MASTER_PORT={PORT} {shell}{pods.python} {pods.command}"
    )
    launcher = pods.pod(["bash", "-c", mpirun], "launcher")
    launcher["containers"][0].pop("resources", None)  # it starts the ranks, and is none
    of = {f"{_LABEL}/job-name": pods.name, f"{_LABEL}/replica-type": "worker", f"{_LABEL}/replica-index": "0"}
    spec = {
        "slotsPerWorker": pods.per,
        "runPolicy": _run_policy(pods),
        "mpiReplicaSpecs": {
            "Launcher": _replicas(pods, 1, launcher),
            "Worker": _replicas(pods, pods.nodes, pods.pod(None, "worker")),  # the operator has them wait for mpirun
        },
    }
    return [
        _service(pods, first, of),
        {"apiVersion": "kubeflow.org/v1", "kind": "MPIJob", "metadata": pods.metadata(), "spec": spec},
    ]
