"""A notebook on the emulated device."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.notebooks import kernel_in
from tests.support.softcuda.emulation import emulated_environment
from tests.support.softcuda.processes import EmulatedDevice

pytestmark = pytest.mark.emulated


def test_a_class_of_a_cell_trains_on_two_devices(emulated: EmulatedDevice, tmp_path: Path) -> None:
    """Losses are those of ranks on the CPU, from a kernel that has used a device, and from one that has not."""
    del emulated  # it is built, or the test is skipped
    losses: list[list[float]] = []
    with kernel_in(tmp_path, emulated_environment()) as kernel:
        for device, before in (("cpu", "pass"), ("cuda", "pass"), ("cuda", "torch.ones(2, device='cuda')")):
            overrides = {"out": f"run{len(losses)}", "device": device}
            launch = f"unipar.launch(CONFIG, task=Mine, overrides={overrides!r}, quiet=True)"
            said = kernel.run(f"{before}\nimport json\nprint(json.dumps([x for _, x in {launch}.losses]))")
            assert said.error == "", said
            losses.append(json.loads(said.stdout.splitlines()[-1]))
            start = json.loads((tmp_path / overrides["out"] / "launch.json").read_text("utf-8"))["settled"]
            assert (start["device"], start["sizes"]["ranks"]) == (device, 2)
    assert losses[1] == losses[2] == pytest.approx(losses[0], rel=1e-6)
