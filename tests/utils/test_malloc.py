"""Freed memory that malloc keeps or returns, in processes of its own and in training."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.world import PYTHONPATH_VARIABLE
from unipar.utils.malloc_settings import is_malloc_set_by_environment

CODE = """
import os

from unipar.utils.malloc_settings import keep_freed_memory
from unipar.utils.procfs import anonymous_memory


def print_returned():
    block = bytearray(b"x") * (int(os.environ["BLOCK"]) * 2**20)
    full = anonymous_memory()
    del block
    print("returned:", round((full - anonymous_memory()) / 2**20, -1))


if os.environ["WAY"] == "keep":
    keep_freed_memory()
if os.environ["WAY"] != "train":
    print_returned()
"""

TASK = """
import torch
import unipar


class Small(unipar.Task):
    def model(self):
        return torch.nn.Linear(2, 1)

    def data(self):
        return [(torch.ones(2), torch.ones(1))] * 4

    def loss(self, model, batch):
        return (model(batch[0]) - batch[1]).square().mean()

    def train(self, run):
        super().train(run)
        print_returned()


settings = {"backend": "single", "device": "cpu", "batch": {"total": 2}, "train": {"steps": 1}}
if __name__ == "__main__" and os.environ["WAY"] == "train":
    unipar.launch(settings, task=Small)
"""


def returned_mib(folder: Path, way: str, block: int, **variables: str) -> int:
    """Return how many MiB of a freed block a process gives back to the system, to the nearest ten."""
    environment = {**os.environ, **PYTHONPATH_VARIABLE, "WAY": way, "BLOCK": str(block), **variables}
    (folder / "script.py").write_text(CODE + (TASK if way == "train" else ""), encoding="utf-8")
    words = [sys.executable, "script.py"]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return int(float(done.stdout.partition("returned:")[2].split()[0]))


@pytest.mark.parametrize(
    ("way", "block", "returned"),
    [("usual", 50, 50), ("keep", 50, 0), ("keep", 300, 300)],
    ids=["malloc as it is", "kept", "very large"],
)
def test_a_freed_block_is_kept_for_the_next_step(tmp_path: Path, way: str, block: int, returned: int) -> None:
    """Up to 256 MiB; malloc as it is returns a block of 50 MiB each time."""
    assert returned_mib(tmp_path, way, block) == returned


def test_training_on_the_cpu_keeps_freed_memory(tmp_path: Path) -> None:
    """Unless the user's environment says how malloc is to behave."""
    assert returned_mib(tmp_path, "train", 50) == 0
    assert returned_mib(tmp_path, "train", 50, MALLOC_TRIM_THRESHOLD_="131072") == 50


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, False),
        ({"MALLOC_ARENA_MAX": "2"}, False),
        ({"GLIBC_TUNABLES": "glibc.rtld.optional_static_tls=512"}, False),
        ({"MALLOC_MMAP_THRESHOLD_": "65536"}, True),
        ({"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=1"}, True),
    ],
)
def test_a_setting_of_the_environment_is_recognised(
    variables: dict[str, str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that concern freed memory, by glibc's old names and by its new ones."""
    for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert is_malloc_set_by_environment() is expected
