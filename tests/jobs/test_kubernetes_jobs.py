"""Kubernetes: every kind of object against the published schemas, and each pod's command really run."""

from __future__ import annotations

import copy
import json
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import yaml

from tests.support.launchers import environment
from tests.support.machines.machine import Machine
from tests.support.machines.start import machines, reason_no_machines
from tests.support.programs import reason_no_programs, skip_because
from tests.support.submissions import submission, text_of, write_config
from unipar.errors import Unsupported
from unipar.jobs.kubernetes_objects import ObjectKind, longest_name
from unipar.results.run_report import Report

VERSION = "1.37"


def why_invalid(made: dict[str, Any]) -> str:
    """Why an object is none; empty: it is valid."""
    kind = made["kind"]
    try:
        if kind in ("Job", "Service"):
            return _by_schema(made)
        if kind in ("TrainJob", "JobSet"):
            return _by_trainer(made)
        return _by_training_operator(made)
    except Exception as e:
        return f"{type(e).__name__}: {e}"


def _by_schema(made: dict[str, Any]) -> str:
    """Kubernetes' own kinds: unknown keys are refused."""
    import kubernetes_validate

    kubernetes_validate.validate(made, VERSION, strict=True)
    return ""


def _by_trainer(made: dict[str, Any]) -> str:
    """Kubeflow Trainer's models, which forget keys that they do not know: what comes back is compared."""
    from kubeflow_trainer_api import models

    kind = models.TrainerV1alpha1TrainJob if made["kind"] == "TrainJob" else models.JobsetV1alpha2JobSet
    read = kind.from_dict(copy.deepcopy(made))
    assert read is not None
    if lost := keys_lost(made, read.to_dict()):
        return f"unknown: {', '.join(lost)}"
    jobs = made["spec"].get("replicatedJobs", [])
    return next((why for one in jobs if (why := _why_no_job(one["template"]["spec"]))), "")


def _by_training_operator(made: dict[str, Any]) -> str:
    """The Training Operator's models, through its client, and the pods by Kubernetes' own schema."""
    from kubeflow.training import models
    from kubernetes import client
    from kubernetes.client import models as known_models

    known: Any = known_models
    for name in dir(models):
        setattr(known, name, getattr(models, name))
    api: Any = client.ApiClient()
    read = api.deserialize(SimpleNamespace(data=json.dumps(made)), f"KubeflowOrgV1{made['kind']}")
    if lost := keys_lost(made, api.sanitize_for_serialization(read)):
        return f"unknown: {', '.join(lost)}"
    replicas = next(value for key, value in made["spec"].items() if key.endswith("ReplicaSpecs"))
    for one in replicas.values():
        if not isinstance(one["replicas"], int):
            return f"replicas: {one['replicas']!r}"
        if why := _why_no_job({"template": one["template"]}):
            return why
    return ""


def _why_no_job(spec: dict[str, Any]) -> str:
    return why_invalid({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": spec})


def keys_lost(given: Any, back: Any, at: str = "") -> list[str]:
    """Keys and values that a model did not give back."""
    if isinstance(given, dict):
        back = back if isinstance(back, dict) else {}
        return [
            lost
            for key, value in given.items()
            for lost in ([f"{at}.{key}"] if key not in back else keys_lost(value, back[key], f"{at}.{key}"))
        ]
    if isinstance(given, list):
        if not isinstance(back, list) or len(back) != len(given):
            return [at]
        return [
            lost for i, (a, b) in enumerate(zip(given, back, strict=True)) for lost in keys_lost(a, b, f"{at}[{i}]")
        ]
    return [] if given == back or str(given) == str(back) else [f"{at}: {given!r} came back as {back!r}"]


KINDS: tuple[ObjectKind, ...] = get_args(ObjectKind)
FIRST_POD: dict[ObjectKind, str] = {
    "trainjob": "x-node-0-0.x",
    "jobset": "x-node-0-0.x",
    "job": "x-0.x",
    "pytorchjob": "x-master-0",
    "mpijob": "x-worker-0",
}
"""Name by which pods find the first one."""

WHY_NO_MPI = reason_no_machines() or reason_no_programs("sshd", "ssh", "mpirun")
IMAGE = "machines.kubernetes.image=registry.example/mine:1"
FULL = """
machines:
  nodes: 2
  ranks_per_node: 2
  time: 2h
  setup: [export SAID=yes]
  kubernetes:
    namespace: ml
    claim: runs
    secrets: {WANDB_API_KEY: keys/wandb}
    resources: {cpu: "8", memory: 64Gi}
    labels: {kueue.x-k8s.io/queue-name: research}
device: cuda
"""

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::pydantic.warnings.PydanticDeprecatedSince20"
)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def objects(here: Path, kind: ObjectKind, *sets: str, more: str = FULL) -> list[dict[str, Any]]:
    """What would be applied."""
    file = write_config(here, more.replace("device: cuda\n", ""))
    device = ["device=cuda"] if "device: cuda" in more else []
    made = submission(file, "kubernetes", [f"machines.kubernetes.kind={kind}", IMAGE, *device, *sets])
    return list(yaml.safe_load_all(text_of(made)))


def every(tree: Any, key: str) -> list[Any]:
    """The values of a key, wherever it is."""
    if isinstance(tree, list):
        return [value for one in tree for value in every(one, key)]
    if not isinstance(tree, dict):
        return []
    return [value for name, one in tree.items() for value in ([one] if name == key else []) + every(one, key)]


@pytest.mark.parametrize("kind", KINDS)
def test_an_object_is_valid(here: Path, kind: ObjectKind) -> None:
    """By the schemas and models that Kubernetes and Kubeflow publish; also without any of the options."""
    for made in [*objects(here, kind), *objects(here, kind, more="machines: {nodes: 2, ranks_per_node: 1}\n")]:
        assert why_invalid(made) == ""


@pytest.mark.parametrize("kind", KINDS)
def test_a_mistake_is_seen(here: Path, kind: ObjectKind) -> None:
    """A strange key, a misspelt image, text for a number: a checker that let these pass would prove nothing."""
    made = objects(here, kind)[-1]
    strange = copy.deepcopy(made)
    strange["spec"]["nonsense"] = 1
    text = yaml.safe_dump(made)
    misspelt = yaml.safe_load(text.replace("image:", "imagge:"))
    for number in ("replicas: 1", "numNodes: 2", "completions: 2"):
        text = text.replace(number, f"{number.partition(' ')[0]} many")
    assert why_invalid(made) == ""
    assert "nonsense" in why_invalid(strange)
    assert "imag" in why_invalid(misspelt)
    assert "many" in why_invalid(yaml.safe_load(text))


@pytest.mark.parametrize("kind", KINDS)
def test_what_every_pod_has(here: Path, kind: ObjectKind) -> None:
    """Memory for /dev/shm, time to save, no restart of single pods, a reference to the secret, GPUs and the volume."""
    made = objects(here, kind)
    assert {"medium": "Memory", "sizeLimit": "16Gi"} in every(made, "emptyDir")
    assert {"mountPath": "/dev/shm", "name": "shm"} in [m for mounts in every(made, "volumeMounts") for m in mounts]
    assert set(every(made, "terminationGracePeriodSeconds")) == {60}
    assert set(every(made, "restartPolicy")) <= {"Never"}
    assert set(every(made, "backoffLimit")) <= {0}
    assert every(made, "secretKeyRef")[0] == {"name": "keys", "key": "wandb"}
    assert {"cpu": "8", "memory": "64Gi", "nvidia.com/gpu": 2} in every(made, "limits")
    assert {"claimName": "runs"} in every(made, "persistentVolumeClaim")
    assert 7200 in every(made, "activeDeadlineSeconds")
    assert all(one["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "research"} for one in made)


def test_restarts_of_a_jobset(here: Path) -> None:
    """A JobSet counts its restarts, and the run goes on; no other kind starts all pods again."""
    restarts = ("launch.restarts=3", "checkpoint.every=5")
    (made,) = objects(here, "jobset", *restarts)
    assert made["spec"]["failurePolicy"] == {"maxRestarts": 3}
    assert "--set resume=auto" in every(made, "command")[0][2]
    with pytest.raises(Unsupported) as e:
        objects(here, "trainjob", *restarts)
    assert str(e.value) == (
        "machines.on: kubernetes: launch.restarts: 3, and a trainjob is not started again as a whole: set "
        "machines.kubernetes.kind to jobset, which counts restarts, or launch.restarts to 0"
    )
    with pytest.raises(Unsupported) as e:
        objects(here, "jobset", *restarts, "machines.kubernetes.claim=null")
    assert str(e.value) == (
        "machines.on: kubernetes: launch.restarts: 3, and the run folder goes with the pods: name a volume for it in "
        "machines.kubernetes.claim"
    )


ALPHABET = "may hold only a-z, 0-9 and -, begin with a letter, and not end with -"


@pytest.mark.parametrize(
    ("key", "name", "sentence"),
    [
        ("name", "Char_GPT", f"'Char_GPT' {ALPHABET}: write char-gpt"),
        ("name", "7b", f"'7b' {ALPHABET}: write run-7b"),
        ("name", "a.b-", f"'a.b-' {ALPHABET}: write a-b"),
        ("namespace", "My_Team", f"'My_Team' {ALPHABET}: write my-team"),
        (
            "name",
            "x" * 60,
            f"'{'x' * 60}' has 60 characters, and so that its pods can have names, 48 are the most: write {'x' * 48}",
        ),
    ],
)
def test_a_name_that_is_refused(here: Path, key: str, name: str, sentence: str) -> None:
    """With one that is taken."""
    with pytest.raises(Unsupported) as e:
        objects(here, "trainjob", f"machines.kubernetes.{key}={name}")
    assert str(e.value) == f"machines.on: kubernetes: machines.kubernetes.{key}: {sentence}"
    taken = sentence.rpartition("write ")[2]
    assert objects(here, "trainjob", f"machines.kubernetes.{key}={taken}")[0]["metadata"]["name"]


@pytest.mark.parametrize("kind", KINDS)
def test_how_long_a_name_may_be(kind: ObjectKind) -> None:
    """A pod's name is a host name, of at most 63 characters: NAME-node-0-15-xxxxx."""
    suffix = {"trainjob": "-node-0-15", "jobset": "-node-0-15", "job": "-15"}.get(kind, "-worker-15")
    assert longest_name(kind, 16) == 63 - len(suffix) - len("-xxxxx")


def test_the_name_of_a_config(here: Path) -> None:
    """That of the run folder, with - instead of _."""
    file = write_config(here, FULL.replace("device: cuda\n", ""), "Char_gpt.yaml")
    (made,) = yaml.safe_load_all(text_of(submission(file, "kubernetes", [IMAGE])))
    assert made["metadata"]["name"] == "char-gpt"


def test_more_that_is_refused(here: Path) -> None:
    """All of it at once."""
    (here / "below").mkdir()
    file = write_config(here, "machines: {ranks_per_node: 2, kubernetes: {secrets: {HF_TOKEN: my-secret}}}\n")
    os.chdir(here / "below")
    with pytest.raises(Unsupported) as e:
        submission(file, "kubernetes")
    assert str(e.value).splitlines() == [
        "machines.on: kubernetes cannot run this config:",
        "  - machines.kubernetes.image: name the container image that holds unipar, the libraries and the task's code",
        "  - machines.kubernetes.secrets.HF_TOKEN: wanted name/key of a secret, as my-secret/key, got 'my-secret'",
        f"  - {file} is not below the working directory, which machines.kubernetes.code (/code) stands for: submit "
        "from a folder above the config",
    ]


def command_of(made: list[dict[str, Any]], here: Path) -> list[str]:
    """The command of the pods, with this machine's folders in the place of the image's."""
    text = next(one for one in every(made, "command"))[2]
    for word, own in (("/code", str(here)), ("/out/", f"{here}/out/"), ("python ", f"{sys.executable} ")):
        text = text.replace(word, own)
    return ["bash", "-c", text]


def operator_variables(kind: ObjectKind, index: int) -> dict[str, str]:
    """What the operator, or Kubernetes, sets in a pod."""
    if kind in ("job", "jobset"):
        return {"JOB_COMPLETION_INDEX": str(index)}
    return {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "1",
        "PET_NODE_RANK": str(index),
        "PET_MASTER_ADDR": FIRST_POD[kind],
        "PET_MASTER_PORT": "23456" if kind == "pytorchjob" else "29400",
    }


@contextmanager
def pods(here: Path, kind: ObjectKind, *, ssh: bool = False) -> Generator[list[Machine]]:
    """Two machines that mount the folder, as pods that find the first one by the name that it has in the cluster."""
    with machines(2, here / "pods", share=[here], ssh=ssh) as made:
        for machine in made:
            with (machine.folder / "hosts").open("a", encoding="utf-8") as hosts:
                hosts.write(f"{made[0].address} {FIRST_POD[kind]}\n{made[1].address} x-worker-1\n")
        yield list(made)


@pytest.mark.slow
@skip_because(reason_no_machines())
@pytest.mark.parametrize("kind", ["trainjob", "pytorchjob", "job", "jobset"])
def test_the_command_of_its_pods(here: Path, kind: ObjectKind) -> None:
    """As it is written, on two machines, with the variables of their operator."""
    command = command_of(
        objects(here, kind, more="machines: {nodes: 2, ranks_per_node: 1, setup: [export SAID=yes]}\n"), here
    )
    (here / "out").mkdir()
    with pods(here, kind) as made:
        started = [
            machine.start(
                command,
                here / f"{machine.name}.log",
                env={**environment(), "TMPDIR": "/tmp", "HOME": "/root", **operator_variables(kind, index)},
                at=str(here),
            )
            for index, machine in enumerate(made)
        ]
        codes = [pod.wait(timeout=180) for pod in started]
    assert codes == [0, 0], "".join(path.read_text("utf-8") for path in here.glob("node*.log"))
    report = Report.read(here / "out/x")
    assert (report.size, report.steps) == (2, 12)


@pytest.mark.slow
@skip_because(WHY_NO_MPI)
def test_the_command_of_an_mpijobs_launcher(here: Path) -> None:
    """A rank on each of two machines, which are in the operator's host file, with the lines before."""
    command = command_of(
        objects(here, "mpijob", more="machines: {nodes: 2, ranks_per_node: 1, setup: [export A=b]}\n"), here
    )
    (here / "out").mkdir()
    (here / "hostfile").write_text("x-worker-0 slots=1\nx-worker-1 slots=1\n", "utf-8")
    variables = {"OMPI_MCA_orte_default_hostfile": f"{here}/hostfile"}
    with pods(here, "mpijob", ssh=True) as made:
        env = {**environment(), "TMPDIR": "/tmp", "HOME": "/root", **variables}
        image = "".join(f"export {name}={env[name]}\n" for name in ("PYTHONPATH", "OMP_NUM_THREADS"))
        made[1].path("/root/.bashrc").write_text(image, "utf-8")  # ssh hands on no variables, an image has its own
        done = made[0].run(command, env=env, at=str(here))
    assert done.returncode == 0, done.stdout + done.stderr
    assert Report.read(here / "out/x").size == 2
