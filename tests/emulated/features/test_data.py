"""Data on the emulated device: ranks that add up what they have read wait for each other, and not for the device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.forks import Forks
from tests.support.softcuda.emulation import ROOT
from tests.support.softcuda.processes import EmulatedDevice
from tests.support.softcuda.trainings.strategies import SIZES, EmulatedTraining, judge, waits_of_a_step


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("WeighedGPT", {}),
        pytest.param("StreamedGPT", {"data": {"stream": "own", "shuffle": False}}, marks=pytest.mark.emulated),
    ],
)
def test_no_wait_for_what_ranks_have_read(
    name: str, more: dict[str, Any], emulated: EmulatedDevice, forks: Forks, tmp_path: Path
) -> None:
    """Losses are those of the CPU, where weights of batches, or sizes of streams' parts, are added up."""
    task = {"use": f"{ROOT}/tests/support/softcuda/trainings/fed.py:{name}", "args": SIZES}
    training = EmulatedTraining("native/nothing", {"task": task, **more})
    on_cpu = training.losses_on_cpu(forks, tmp_path)
    run = training.run(emulated, "fp32", tmp_path)
    assert judge(replace(training, near=5e-7), "fp32", run, on_cpu) == ""
    assert waits_of_a_step(training, run) == {}
