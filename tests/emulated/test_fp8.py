"""Linear layers in fp8 on the emulated device: by the kernel that a GPU has for them, or refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.forks import Forks
from tests.support.softcuda.processes import EmulatedDevice, run_code
from tests.support.softcuda.trainings.memory_accounts import check_accounts
from tests.support.softcuda.trainings.strategies import CODE, EmulatedTraining
from unipar.run_folder.layout import run_log_path
from unipar.run_folder.run_log import RunLog

SAID = (
    "fp8 ({recipe}, torch._scaled_mm) in 8 of 9 linear layers: layers.*.qkv, layers.*.out, layers.*.mlp.0, "
    "layers.*.mlp.2; in bf16: head (outside of blocks)"
)


@pytest.mark.emulated
@pytest.mark.parametrize(
    ("strategy", "precision", "recipe"),
    [
        ("native/nothing", "fp8", "tensorwise"),
        ("native/parameters", "fp8-rowwise", "rowwise"),
        ("deepspeed/parameters", "fp8", "tensorwise"),
    ],
)
def test_losses_are_near_those_of_the_cpu(
    strategy: str, precision: str, recipe: str, emulated: EmulatedDevice, forks: Forks, tmp_path: Path
) -> None:
    """In a run without a race that says which layers multiplied by what."""
    training = EmulatedTraining(strategy)
    given = json.dumps(training.settings(precision, tmp_path / "run"))
    done = emulated.run(CODE.format(settings=given, strategy=strategy), "h100", devices=2)
    settings = json.dumps(training.settings(precision, tmp_path / "cpu", "cpu"))
    on_cpu = run_code(forks, CODE.format(settings=settings, strategy=strategy), tmp_path)
    assert done.error == ""
    assert done.result == pytest.approx(on_cpu, rel=3e-3)
    assert done.texts("race") == []
    notes = [row["said"] for row in RunLog.read(run_log_path(tmp_path / "run", 0)) if row["event"] == "precision"]
    assert notes == [SAID.format(recipe=recipe), "8 of 8 linear layers ran torch._scaled_mm"]


@pytest.mark.emulated
def test_a_gpu_without_fp8_is_refused(emulated: EmulatedDevice, tmp_path: Path) -> None:
    """An A100 has compute capability 8.0."""
    done = EmulatedTraining("single", ranks=1).run(emulated, "fp8", tmp_path)
    assert done.error.endswith(
        "train.precision: fp8 needs a GPU of compute capability 8.9 or more, and NVIDIA A100-SXM4-80GB has 8.0: take "
        "bf16-mixed, or try fp8 with device: cpu, where it is emulated"
    )


@pytest.mark.emulated
def test_accounts_close_and_plans_are_near(tmp_path: Path) -> None:
    """What a product by the device's kernel allocates is planned, and recorded to the byte."""
    trainings = [EmulatedTraining(s, precisions=("fp8",)) for s in ("native/nothing", "native/parameters")]
    with EmulatedDevice(tmp_path, "h100") as device:
        checks = check_accounts(device, "fp8", trainings)
    assert list(checks) == ["single", "native/nothing", "native/parameters"]
    assert {strategy: str(check) for strategy, check in checks.items() if not check.is_good} == {}
