"""What Kubernetes and Kubeflow would say of an object, without a cluster: their published schemas and models.

Rules that the operators' definitions hold in CEL, and admission webhooks, are not among them.
"""

from __future__ import annotations

import copy
import json
from types import SimpleNamespace
from typing import Any

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
