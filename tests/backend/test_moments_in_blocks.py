"""Refusals of moments of 8 and 16 bits, before any process starts."""

from __future__ import annotations

import importlib.util
from importlib.machinery import ModuleSpec
from typing import Any

import pytest

from unipar.backend import checks
from unipar.config import Config
from unipar.errors import BackendNotInstalled, Unsupported

EIGHT_BITS = {"name": "adamw-8bit", "lr": 1e-3}
BF16 = {"name": "adamw-bf16", "lr": 1e-3}


def _config(train: Any, **more: Any) -> Config:
    return Config.model_validate({"batch": {"total": 8, "micro": 2}, "train": {"steps": 8, **train}, **more})


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            _config({"optimizer": EIGHT_BITS}, parallel={"data": 1, "tensor": 2}),
            "train.optimizer.name: adamw-8bit is not available with parallel.tensor: 2: its moments share a scale in "
            "blocks of elements of a row, and each of 2 ranks has a part of most blocks; leave parallel.tensor out "
            "(parallel.shard: parameters splits between rows), or take adamw",
        ),
        (
            _config({"parts": {"critic": {"optimizer": EIGHT_BITS}}, "precision": "fp64"}),
            "train.parts.critic.optimizer.name: adamw-8bit is not available with train.precision: fp64: torchao "
            "computes the update in fp32, with moments of 8 bits; take adamw",
        ),
        (
            _config({"optimizer": EIGHT_BITS, "local_steps": 4}, parallel={"data": 2}),
            "train.optimizer.name: adamw-8bit is not available with train.local_steps: 4: ranks average their moments, "
            "and codes of 8 bits have no mean; leave one of them out",
        ),
        (
            _config(
                {"optimizer": EIGHT_BITS},
                model={"offload": "parameters"},
                parallel={"data": 2, "shard": "parameters"},
            ),
            "train.optimizer.name: adamw-8bit is not available with model.offload: parameters: moments that are in "
            "host memory take none of the device, in 8 bits or 32; leave one of them out",
        ),
        (
            _config({"optimizer": EIGHT_BITS}, backend="deepspeed", parallel={"data": 2, "shard": "gradients"}),
            "train.optimizer.name: adamw-8bit is not available: ZeRO joins parameters in flat tensors, where blocks of "
            "moments would reach from one parameter into the next; use native, horovod or accelerate (without "
            "options.accelerate.through), or take adamw",
        ),
        (
            _config({"parts": {"critic": {"optimizer": BF16}}, "local_steps": 4}, parallel={"data": 2}),
            "train.parts.critic.optimizer.name: adamw-bf16 is not available with train.local_steps: 4: ranks average "
            "their moments, and their mean would be rounded to the nearest bf16; leave one of them out",
        ),
        (
            _config(
                {"optimizer": BF16},
                backend="deepspeed",
                parallel={"data": 2, "shard": "gradients"},
                options={"deepspeed": {"offload_optimizer": "cpu"}},
            ),
            "train.optimizer.name: adamw-bf16 is not available with options.deepspeed.offload_optimizer: cpu: moments "
            "in host memory take none of the device, in bf16 or fp32; leave one of them out",
        ),
    ],
)
def test_refusals(config: Config, reason: str) -> None:
    """Key, numbers, way out."""
    with pytest.raises(Unsupported) as caught:
        checks.check_can_run(config)
    assert reason in str(caught.value)


def test_a_missing_library_is_named_with_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any process starts."""

    def find_spec(name: str) -> ModuleSpec | None:
        return None if name == "torchao" else importlib.util.find_spec(name)

    monkeypatch.setattr(checks, "find_spec", find_spec)
    with pytest.raises(BackendNotInstalled) as caught:
        checks.check_can_run(_config({"optimizer": EIGHT_BITS}))
    assert str(caught.value) == (
        "train.optimizer.name: adamw-8bit needs torchao, not installed here: pip install 'unipar[torchao]'"
    )
    with pytest.raises(BackendNotInstalled) as caught:
        checks.check_can_run(_config({"precision": "fp8-rowwise"}))
    assert str(caught.value) == (
        "train.precision: fp8-rowwise needs torchao, not installed here: pip install 'unipar[torchao]'; or take "
        "bf16-mixed"
    )
