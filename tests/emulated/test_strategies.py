"""Strategies on the emulated device: losses of one process on the CPU, and no race."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.softcuda.processes import EmulatedDevice
from tests.support.softcuda.strategies import TRAININGS, EmulatedTraining, judge, losses_of_one_process

pytestmark = pytest.mark.emulated

PLAYED = (
    "native/nothing",
    "native/optimizer",
    "native/parameters",
    "native/nothing+tensor2",
    "native/nothing+pipeline2",
    "native/nothing+context2",
    "deepspeed/nothing",
    "deepspeed/optimizer",
    "deepspeed/parameters",
    "accelerate/nothing",
    "accelerate/parameters",
)
"""Strategies of which `make test` plays fp32; `make emulated` plays all, in each precision."""

HALVES = (("native/parameters", "bf16-mixed"), ("native/nothing", "fp16"))


@pytest.fixture(scope="module")
def wanted(emulated: EmulatedDevice, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of one process on the CPU."""
    return losses_of_one_process(emulated, tmp_path_factory.mktemp("one"))


@pytest.mark.parametrize("cell", PLAYED)
def test_two_ranks(cell: str, emulated: EmulatedDevice, wanted: list[float], tmp_path: Path) -> None:
    """Each strategy on two devices trains to the losses of one process on the CPU, and no stream reads too early."""
    (training,) = (training for training in TRAININGS if training.cell == cell)
    assert judge(training, "fp32", training.run(emulated, "fp32", tmp_path), wanted) == ""


@pytest.mark.parametrize(("cell", "precision"), HALVES)
def test_in_16_bits(cell: str, precision: str, emulated: EmulatedDevice, wanted: list[float], tmp_path: Path) -> None:
    """Losses are near those in fp32, and not the same."""
    (training,) = (training for training in TRAININGS if training.cell == cell)
    run = training.run(emulated, precision, tmp_path)
    assert judge(training, precision, run, wanted) == ""
    assert max(abs(a - b) for a, b in zip(run.result, wanted, strict=True)) > 1e-5


def test_a_result_that_is_wrong() -> None:
    """The judge itself: losses too far, a rank on the CPU, a race."""
    from tests.support.softcuda.findings import DeviceFinding
    from tests.support.softcuda.processes import EmulatedRun

    training = EmulatedTraining("native/nothing")
    waits = tuple(DeviceFinding("wait", "item", (), pid) for pid in (1, 2))
    race = DeviceFinding("race", "x reads what y wrote", ("a.py:1",), 1)

    def said(*losses: float, findings: tuple[DeviceFinding, ...] = waits) -> str:
        return judge(training, "fp32", EmulatedRun(list(losses), 0, "", findings), [1.0, 0.5])

    assert said(1.0, 0.5) == ""
    assert said(1.0, 0.6) == "losses are 0.1 apart"
    assert said(1.0, float("nan")) == "losses are nan apart"
    assert said(1.0, 0.5, findings=waits[:1]) == "not each rank has used the device"
    assert said(1.0, 0.5, findings=(*waits, race)) == "race: x reads what y wrote (a.py:1)"
    failed = EmulatedRun(None, 1, "Traceback\nValueError: no\n", ())
    assert judge(training, "fp32", failed, [1.0, 0.5]) == "ValueError: no"
