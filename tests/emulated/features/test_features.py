"""Features beside a strategy, on the emulated device: losses of the CPU, and the waits that they cost."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.forks import Forks
from tests.support.softcuda.processes import EmulatedDevice
from tests.support.softcuda.trainings.strategies import (
    FEATURES,
    SIZES,
    STEPWISE,
    EmulatedTraining,
    judge,
    largest_difference,
    losses_of_one_process,
    waits_of_a_step,
)

ZERO_1 = "runtime/zero/stage_1_and_2.py"
ZERO_3 = "runtime/zero/stage3.py"
NORM = {"copy from pageable memory in deepspeed/runtime/utils.py": 1.0, "item in deepspeed/runtime/utils.py": 2.0}
"""Waits of DeepSpeed's stages 1 and 2 for a norm."""

EXCHANGE = {"copy to the host in unipar_mesh/expert/exchange.py": 4.0}
"""One wait, for the numbers of rows, in each forward of a layer of experts: two layers in two microbatches."""

MASK = {"item in site-packages/transformers/masking_utils.py": 2.0}
"""Waits of transformers for a mask in each microbatch."""

NORM_ON_HOST = {"item in unipar/engines/update_guard.py": 1.0}
"""Wait for a norm, which must be finite, before an update by an optimizer that cannot leave it out on the device."""

GROUPED_BACKWARD = {"copy to the host in torch": 16.0}
"""Waits of a backward of grouped products for the numbers of rows, of torch's own kernel that is not CUDA's."""

WAITS: dict[str, dict[str, float]] = {
    "native/parameters, offload: parameters": {"copy to the host in torch": 24.0, "event in torch": 24.0},
    "deepspeed/optimizer, offload: optimizer, deepspeed: torch": {
        f"item in {ZERO_1}": 26.0, f"event in {ZERO_1}": 1.0, f"copy from pageable memory in {ZERO_1}": 1.0,
    },
    "deepspeed/gradients, offload: optimizer, deepspeed: torch": {
        f"item in {ZERO_1}": 26.0, f"event in {ZERO_1}": 25.0, f"copy from pageable memory in {ZERO_1}": 1.0,
    },
    "deepspeed/parameters, offload: parameters, deepspeed: torch": {
        f"stream in {ZERO_3}": 2.0, f"item in {ZERO_3}": 1.0, f"copy from pageable memory in {ZERO_3}": 1.0,
        f"copy to the host in {ZERO_3}": 1.0, "copy from pageable memory in deepspeed/runtime/utils.py": 1.0,
        "copy from the host in runtime/zero/partition_parameters.py": 24.0,
        "device in deepspeed/accelerator/cuda_accelerator.py": 1.0,
    },
    "deepspeed/parameters, consistency_check: 4": {
        "copy from pageable memory in runtime/zero/stage3.py": 1.0, "item in deepspeed/runtime/utils.py": 1.0,
        "device in deepspeed/accelerator/cuda_accelerator.py": 1.0, "stream in runtime/zero/stage3.py": 2.0,
    },
    "native/nothing, optimizer: muon": NORM_ON_HOST,
    "native/parameters, optimizer: muon": NORM_ON_HOST,
    "native/nothing, optimizer: adamw-8bit": NORM_ON_HOST,
    "native/optimizer, optimizer: adamw-8bit": NORM_ON_HOST,
    "deepspeed/optimizer, ema: 0.9": NORM,
    "deepspeed/gradients, compile: aot_eager": NORM,
    "deepspeed/gradients, contrastive": NORM,
    "deepspeed/gradients, parts": {what: 2 * count for what, count in NORM.items()},
    "deepspeed/gradients, tokens": NORM,
    "native/nothing+expert2, Experts stacked": EXCHANGE | {"nonzero in tests/support/expert_models.py": 16.0},
    "native/nothing+expert2, Experts list": EXCHANGE | {"nonzero in tests/support/expert_models.py": 64.0},
    "native/nothing+expert2, Mixtral batched_mm": EXCHANGE | MASK,
    "native/nothing+expert2, Mixtral grouped_mm": EXCHANGE | MASK | GROUPED_BACKWARD | {
        "copy to the host in transformers/integrations/moe.py": 8.0,
    },
    "native/parameters+expert2, Mixtral batched_mm": EXCHANGE | MASK,
    "deepspeed/optimizer+expert2, Mixtral": MASK | GROUPED_BACKWARD | {
        "copy to the host in deepspeed/module_inject/auto_ep_layer.py": 4.0,
        "copy from pageable memory in deepspeed/module_inject/auto_ep_layer.py": 4.0,
        "copy to the host in deepspeed/moe/ep_experts.py": 8.0, "item in deepspeed/moe/ep_kernels.py": 80.0,
        "copy from pageable memory in deepspeed/runtime/utils.py": 2.0, "item in deepspeed/runtime/utils.py": 3.0,
    },
}  # fmt: skip
"""Waits of a rank in a step between two logged ones: libraries' own, the models', and one for a norm; others have none.

Experts cost one wait for each layer and microbatch, whose exact numbers of rows the host must know.
"""

NEAR = 5e-7
"""Two bits of a loss between 2 and 4; a mean of weights after four steps apart is less near."""

LESS_NEAR = {"local_steps": 5e-6, "contrastive": 5e-6, "Mixtral": 2e-6}
"""Convolutions have another kernel than on the CPU, and so has attention; losses of Mixtral are between 4 and 8."""

PLAYED = ("native/nothing, contrastive", "native/nothing, parts", "native/nothing, tokens",
          "native/nothing+expert2, Experts stacked")  # fmt: skip
"""Trainings that `make test` plays."""


@pytest.mark.parametrize(
    "training",
    [pytest.param(t, id=t.name, marks=() if t.name in PLAYED else pytest.mark.emulated) for t in FEATURES],
)
def test_feature(training: EmulatedTraining, emulated: EmulatedDevice, forks: Forks, tmp_path: Path) -> None:
    """Losses are those of the CPU, where nothing is offloaded; what a library waits for is known."""
    on_cpu = training.losses_on_cpu(forks, tmp_path)
    run = training.run(emulated, "fp32", tmp_path)
    assert judge(training, "fp32", run, on_cpu) == ""
    apart = next((apart for word, apart in LESS_NEAR.items() if word in training.name), NEAR)
    assert largest_difference(run.result, on_cpu) <= apart
    assert waits_of_a_step(training, run) == WAITS.get(training.name, {})


@pytest.mark.emulated
@pytest.mark.parametrize("training", [t for t in FEATURES if "bf16-mixed" in t.precisions], ids=lambda t: t.name)
def test_experts_in_bf16(training: EmulatedTraining, emulated: EmulatedDevice, forks: Forks, tmp_path: Path) -> None:
    """Losses are near those of the CPU in fp32, and not the same; nothing else is waited for."""
    on_cpu = training.losses_on_cpu(forks, tmp_path)
    run = training.run(emulated, "bf16-mixed", tmp_path)
    assert judge(training, "bf16-mixed", run, on_cpu) == ""
    assert largest_difference(run.result, on_cpu) > 1e-5
    assert waits_of_a_step(training, run) == WAITS[training.name]


def test_dataparallel_over_two_devices(emulated: EmulatedDevice, forks: Forks, tmp_path: Path) -> None:
    """One process deals its microbatches to both, and has the losses of one that has one device."""
    run = EmulatedTraining("native/nothing+dp", ranks=1).run(emulated, "fp32", tmp_path)
    on_cpu = losses_of_one_process(forks, tmp_path)
    assert judge(EmulatedTraining("single", ranks=1), "fp32", run, on_cpu) == ""


@pytest.mark.emulated
@pytest.mark.parametrize("schedule", ["interleaved", "zerobubble"])
def test_schedules_of_torch_in_fp16(schedule: str, emulated: EmulatedDevice, forks: Forks, tmp_path: Path) -> None:
    """Ranks with two stages each scale the loss: losses are near those of the CPU in fp32, and not the same."""
    deeper = {"use": f"{STEPWISE}:StepwiseGPT", "args": {**SIZES, "layers": 4}}
    more = {"task": deeper, "data": {"last_batch": "drop"}}
    training = EmulatedTraining(f"native/nothing+pipeline2+{schedule}", more)
    on_cpu = training.losses_on_cpu(forks, tmp_path)
    run = training.run(emulated, "fp16", tmp_path)
    assert judge(training, "fp16", run, on_cpu) == ""
    assert largest_difference(run.result, on_cpu) > 1e-5
    assert waits_of_a_step(training, run) == {}


def test_every_wait_is_of_a_feature() -> None:
    """The tables above name no training that is not there."""
    assert {*WAITS, *PLAYED} <= {training.name for training in FEATURES}
