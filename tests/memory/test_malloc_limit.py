"""A limit on allocations, in processes that preload the meter."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.world import PYTHONPATH_VARIABLE
from unipar.memory.sources.malloc_build import build_meter, preload_environment

CODE = """
import ctypes, os, sys
import torch
from unipar.memory.sources.malloc_limit import *

MIB = 2**20
before = torch.ones(8 * MIB // 4)  # does not count
limit_allocations(16 * MIB, sys.argv[1])


def tell(name, mib):
    try:
        made = torch.ones(mib * MIB // 4)
        print(name, "fits")
        return made
    except RuntimeError as e:
        print(name, "fails:", "can't allocate memory: you tried to allocate" in str(e))


a = tell("10", 10)
tell("10 more", 10)
b = tell("5 more", 5)
python = None
try:
    python = bytearray(4 * MIB)
    print("Python's own 4 fit")
except MemoryError:
    print("Python's own 4 fail")
del python
print("left:", round(allocations_left() / MIB), "refused:", ctypes.CDLL(None).unipar_meter_refusals() > 0)
del a, b
tell("15, when all is freed,", 15)
with uncounted_allocations():
    data = tell("100 of data", 100)
tell("15 beside the data", 15)
tell("17 beside the data", 17)
sys.stdout.flush()  # or the fork prints it again
if not (child := os.fork()):
    tell("64 in a fork", 64)
    sys.stdout.flush()
    os._exit(0)
os.waitpid(child, 0)
"""


@pytest.mark.parametrize(
    ("counted", "python"), [pytest.param("all", "fail", marks=pytest.mark.sweep), ("tensors", "fit")]
)
def test_a_limit_on_allocations(counted: str, python: str) -> None:
    """What exceeds it is refused, and nothing breaks; what is freed, or is data, may be allocated again."""
    one_thread = {"OMP_NUM_THREADS": "1"}  # a fork of a process whose OpenMP has threads waits for them for ever
    environment = {**os.environ, **preload_environment(build_meter()), **PYTHONPATH_VARIABLE, **one_thread}
    done = subprocess.run(
        [sys.executable, "-c", CODE, counted], env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.stdout.splitlines() == [
        "10 fits",
        "10 more fails: True",
        "5 more fits",
        f"Python's own 4 {python}",
        "left: 1 refused: True",
        "15, when all is freed, fits",
        "100 of data fits",
        "15 beside the data fits",
        "17 beside the data fails: True",
        "64 in a fork fits",
    ], done.stderr
