"""Tests that are marked gpu, on three emulated devices."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from benchmarks.gpu.rows import marked_tests
from tests.support.softcuda.emulation import ROOT, emulated_environment
from tests.support.softcuda.processes import EmulatedDevice

FILES = list(dict.fromkeys(test.partition("::")[0] for test in marked_tests()))
SKIPPED = re.compile(
    r"^SKIPPED \[\d+\] \S+: (?:horovod/nothing: device: cuda: this Horovod was built for tensors of the CPU alone, .*"
    r"|not built here|torchao is not installed here)$"
)
"""What cannot be here; no such test needs a GPU's own kernels."""


@pytest.mark.emulated
@pytest.mark.parametrize("file", FILES)
def test_all_pass(file: str, emulated: EmulatedDevice) -> None:
    """They run as on a GPU, in workers that are new interpreters; one of Horovod needs its build for CUDA."""
    del emulated  # it is built, or the test is skipped
    words = ["-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "-n", "0", "-m", "gpu", file]
    environment = os.environ | emulated_environment(devices=3)
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=1200
    )
    assert done.returncode == 0, done.stdout
    lines = [line for line in done.stdout.splitlines() if line.startswith("SKIPPED")]
    assert [line for line in lines if not SKIPPED.match(line)] == []
    assert re.search(r"^\d+ passed", done.stdout, re.MULTILINE), done.stdout
