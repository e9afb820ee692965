"""`make gpu` on the emulated device: its rows run where they are to run, before a GPU is there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.softcuda.emulation import emulated_environment
from tests.support.softcuda.processes import EmulatedDevice

pytestmark = pytest.mark.emulated


def test_device_and_collectives(emulated: EmulatedDevice, tmp_path: Path) -> None:
    """The device's memory and products, collectives of one rank over its NCCL and of two over gloo."""
    del emulated  # it is built, or the test is skipped
    words = ["-m", "benchmarks.gpu", "--only", "device,collectives", "--patience", "3", "--out", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, *words], env=emulated_environment("a100"), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout
    rows = json.loads((tmp_path / "gpu.json").read_text("utf-8"))["rows"]
    assert {row["row"]: row["figure"].split(";")[0] for row in rows} == {
        "device": "NVIDIA A100-SXM4-80GB, 80 GiB, products within limits",
        "collectives/1": "nccl: 8 of 8 work",
        "collectives/2": "gloo: 8 of 8 work",
    }
