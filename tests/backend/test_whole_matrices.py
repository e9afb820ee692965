"""Where an optimizer by whole matrices is refused, before any process starts."""

from __future__ import annotations

from typing import Any

import pytest

from unipar.backend.checks import check_can_run
from unipar.config import Config
from unipar.errors import Unsupported

MUON = {"name": "muon", "lr": 1e-3}
TENSOR = (
    "{}.name: muon is not available with parallel.tensor: 2: Muon updates each matrix as a whole, and each of 2 ranks "
    "has a part of it; leave parallel.tensor out (parallel.shard: parameters splits between steps alone), or take adamw"
)
OFFLOAD = (
    "train.optimizer.name: muon is not available with model.offload: parameters: its matrices are joined on the "
    "device; leave one of them out"
)
OFFLOADED = (
    "train.optimizer.name: muon is not available with options.deepspeed.offload_optimizer: cpu: its matrices are "
    "joined on the device; leave one of them out"
)


def _config(train: Any, **more: Any) -> Config:
    return Config.model_validate({"batch": {"total": 8, "micro": 2}, "train": {"steps": 1, **train}, **more})


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (_config({"optimizer": MUON}, parallel={"data": 1, "tensor": 2}), TENSOR.format("train.optimizer")),
        (
            _config({"parts": {"critic": {"optimizer": MUON}}}, parallel={"data": 1, "tensor": 2}),
            TENSOR.format("train.parts.critic.optimizer"),
        ),
        (
            _config({"optimizer": MUON}, model={"offload": "parameters"}, parallel={"data": 2, "shard": "parameters"}),
            OFFLOAD,
        ),
        (
            _config(
                {"optimizer": MUON},
                backend="deepspeed",
                parallel={"data": 2, "shard": "gradients"},
                options={"deepspeed": {"offload_optimizer": "cpu"}},
            ),
            OFFLOADED,
        ),
    ],
)
def test_refusals(config: Config, reason: str) -> None:
    """Key, numbers, way out."""
    with pytest.raises(Unsupported) as caught:
        check_can_run(config)
    assert reason in str(caught.value)


def test_elsewhere_it_runs() -> None:
    """With parameters split, stages of a pipeline and split sequences."""
    for axes in ({"pipeline": 2}, {"context": 2}, {}):
        check_can_run(_config({"optimizer": MUON}, parallel={"data": 2, "shard": "parameters", **axes}))
