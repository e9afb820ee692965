"""What is refused where there is a device, before anything is started."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.softcuda.processes import EmulatedDevice

pytestmark = pytest.mark.emulated

CODE = """
import json
from unipar.backend import offered_strategies as strategies
from unipar.backend.checks import check_can_run
from unipar.backend.resources import check_device_count
from unipar.config import Strategy, Config
from unipar.errors import UniparError
result = {{}}
for name, (strategy, changes) in json.loads({cases!r}).items():
    made = {{**json.loads({base!r}), **changes}}
    made.setdefault("parallel", {{}})["data"] = 2
    try:
        config = strategies.config_in_strategy(Config.model_validate(made), Strategy.parse(strategy))
        check_can_run(config)
        check_device_count(config, 2)
    except (UniparError, ValueError) as e:
        result[name] = str(e)
"""
BASE = {
    "task": {"use": "examples/char_gpt.py:CharGPT"},
    "device": "cuda",
    "batch": {"total": 4},
    "train": {"steps": 1},
}
MUON, IN_8_BITS, IN_BF16 = ({"steps": 1, "optimizer": {"name": name}} for name in ("muon", "adamw-8bit", "adamw-bf16"))
FP16 = {"steps": 1, "precision": "fp16"}
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "muon, offloaded": (
        "native/parameters",
        {"train": MUON, "model": {"offload": "parameters"}},
        "muon is not available with model.offload: parameters: its matrices are joined on the device",
    ),
    "8 bits, offloaded": (
        "native/parameters",
        {"train": IN_8_BITS, "model": {"offload": "parameters"}},
        "model.offload: parameters: moments that are in host memory take none of the device",
    ),
    "muon, offloaded by DeepSpeed": (
        "deepspeed/gradients",
        {"train": MUON, "model": {"offload": "optimizer"}},
        "muon is not available with options.deepspeed.offload_optimizer: cpu: its matrices are joined on the device",
    ),
    "bf16, offloaded by DeepSpeed": (
        "deepspeed/gradients",
        {"train": IN_BF16, "model": {"offload": "optimizer"}},
        "adamw-bf16 is not available with options.deepspeed.offload_optimizer: cpu: moments in host memory",
    ),
    "split and offloaded by DeepSpeed": (
        "deepspeed/gradients+tensor2",
        {"model": {"offload": "optimizer"}},
        "offloading is not available with parallel.tensor: no run of DeepSpeed's AutoTP with offloaded state has been",
    ),
    "split and offloaded": (
        "native/parameters+tensor2",
        {"model": {"offload": "parameters"}},
        "model.offload: parameters is not available with ",
    ),
    "fp16 and PowerSGD": (
        "native/nothing",
        {"train": FP16, "options": {"native": {"hook": "powersgd"}}},
        "options.native.hook: powersgd is not available with precision: fp16",
    ),
    "fp16 and steps apart": (
        "native/nothing",
        {"train": {**FP16, "local_steps": 2}},
        "local_steps (2) and fp16 exclude each other",
    ),
    "fp16 on the CPU": ("native/nothing", {"train": FP16, "device": "cpu"}, "train.precision: fp16 needs CUDA"),
    "offloaded on the CPU": (
        "native/parameters",
        {"model": {"offload": "parameters"}, "device": "cpu"},
        "model.offload: parameters needs CUDA",
    ),
    "two ranks on mps": ("native/nothing", {"device": "mps"}, "parallel.data: 2 ranks on mps, which is one process"),
}


def test_refusals(emulated: EmulatedDevice) -> None:
    """Each setting that a device's training cannot have, in its sentence."""
    cases = json.dumps({name: case[:2] for name, case in CASES.items()})
    run = emulated.run(CODE.format(base=json.dumps(BASE), cases=cases))
    assert run.result is not None, run.stderr
    said: dict[str, str] = run.result
    assert {name: case[2] in said.get(name, "") for name, case in CASES.items()} == dict.fromkeys(CASES, True), said


def test_one_rank_on_mps_is_not_refused(emulated: EmulatedDevice) -> None:
    """How many there are of such devices is not counted."""
    run = emulated.run(
        "import json\nfrom unipar.backend.resources import check_device_count\nfrom unipar.config import Config\n"
        f"config = Config.model_validate({BASE | {'device': 'mps'}!r})\n"
        "result = str(check_device_count(config, 1))"
    )
    assert run.result == "None", run.stderr
