"""A comparison whose memory is recorded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.forks import Forks

ROOT = Path(__file__).parents[2]


TASK = '''
import ctypes
import os
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import unipar

KEPT = []


class Info(ctypes.Structure):
    _fields_ = [("of", ctypes.c_size_t * 10)]


def maps():
    """Whether malloc asks the system for a mebibyte, and gives it back when that is freed: 1, or 0."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    libc.mallinfo2.restype = Info
    before = libc.mallinfo2().of[3]
    block = libc.malloc(2**20)
    after = libc.mallinfo2().of[3]
    libc.free(block)
    return after - before


class Tied(unipar.Task):
    """A little more than a million parameters, of which a quarter is used twice."""

    def __init__(self, plant=""):
        self.plant = plant

    def model(self):
        model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(5)), nn.LayerNorm(512))
        model[4].weight = model[0].weight
        return model

    def data(self):
        return TensorDataset(torch.randn(64, 512, generator=torch.Generator().manual_seed(1)))

    def loss(self, model, batch):
        with Path(__file__).with_name(f"maps-{os.getpid()}").open("a") as file:
            file.write(str(maps()))
        loss = model(batch[0]).square().mean()
        if self.plant == "outside the graph":
            KEPT.append(torch.ones(1_250_000))
            loss.register_hook(lambda grad: KEPT.clear())
        elif self.plant == "for good" and not KEPT:
            KEPT.append(torch.ones(1_250_000))
        return loss
'''


def compared(
    folder: Path, *strategies: str, plant: str = "", forks: Forks | None = None, **more: Any
) -> dict[str, Any]:
    """Return the rows of a comparison by the command, by strategy: with workers of `forks`, or new interpreters."""
    (folder / "task.py").write_text(TASK, encoding="utf-8")
    told = {
        "task": {"use": "task.py:Tied", "args": {"plant": plant}},
        "device": "cpu",
        "parallel": {"data": 2},
        "batch": {"total": 8},
        "model": {"blocks": "none"},
        "train": {"steps": 10, "optimizer": {"lr": 1e-3}},
        "out": str(folder / "out"),
    }
    (folder / "x.yaml").write_text(json.dumps(told | more), encoding="utf-8")
    words = ["compare", str(folder / "x.yaml"), "--details", *(w for c in strategies for w in ("--strategy", c))]
    path = os.pathsep.join([str(ROOT / "tests" / "support" / "faulty"), str(ROOT)])
    if forks is not None:
        done = forks.unipar(words, {"PYTHONPATH": path}, memory=True)
    else:
        command = [sys.executable, "-m", "unipar", *words]
        done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    data = json.loads((folder / "out/compare/compare.json").read_text("utf-8"))
    mapped = [file.read_text("ascii") for file in folder.glob("maps-*")]
    told = {"said": done.stdout, "mapped": mapped, "forecast": data["forecast"]}
    return {**told, **{row["strategy"]: row for row in data["strategies"]}}
