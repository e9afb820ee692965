"""`make gpu` on the emulated device: a row of each kind, before a GPU is there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.softcuda.emulation import ROOT, emulated_environment
from tests.support.softcuda.processes import EmulatedDevice

pytestmark = pytest.mark.emulated

FIGURES = {
    "packages": "accelerate, deepspeed, ",
    "device": "NVIDIA A100-SXM4-80GB, 80 GiB, products within limits; ",
    "collectives/1": "nccl: 8 of 8 work",
    "collectives/2": "gloo: 8 of 8 work",
    "compare/1": "9 of 10 strategies ran; fastest ",
    "verify/2/native": "4 of 4 strategies agree",
    "account/2/native/parameters": "rank 0: sum 103.4 MiB, max_memory_allocated 103.4 MiB, 0.00 % without a category ",
    "bf16-master/1/native/gradients": "losses within ",
    "fp16/2/accelerate": "losses within ",
    "offload/1/native/parameters": "losses within ",
}
"""How the figures begin."""


@pytest.mark.parametrize("row", FIGURES)
def test_a_row_passes(row: str, emulated: EmulatedDevice, tmp_path: Path) -> None:
    """Memory, products, collectives, losses beside those of the CPU, and an account beside the allocator's peak."""
    del emulated  # it is built, or the test is skipped
    code, result, figure = _run_row(row, tmp_path)
    assert (code, result) == (0, "passed"), figure
    assert figure.startswith(FIGURES[row])


def test_a_row_that_needs_kernels_says_so(emulated: EmulatedDevice, tmp_path: Path) -> None:
    """A model that is compiled by default has kernels of Triton, and here is none."""
    del emulated
    _, result, figure = _run_row("compile/1/single", tmp_path)
    assert result == "failed"
    assert figure.startswith("WorkerFailed: rank 0 failed: TritonMissing: Cannot find a working triton installation. ")


def _run_row(row: str, folder: Path) -> tuple[int, str, str]:
    """Return the exit code, the row's result and its figure."""
    words = ["-m", "benchmarks.gpu", "--only", row, "--patience", "5", "--minutes", "20", "--out", str(folder)]
    done = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env=emulated_environment("a100"),
        capture_output=True,
        text=True,
        check=False,
        timeout=1300,
    )
    (found,) = json.loads((folder / "gpu.json").read_text("utf-8"))["rows"]
    return done.returncode, found["result"], found["figure"]
