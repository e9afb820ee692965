"""A task whose export is run."""

from __future__ import annotations

from typing import Any

from tests.support.world import ROOT

FILE = ROOT / "tests/support/traveller.py"


WORDS: dict[str, Any] = {
    "task": {"use": f"{FILE}:Words20", "args": {"width": 16}},
    "device": "cpu",
    "parallel": {"data": 2},
    "batch": {"total": 8, "micro": 2},
    "train": {
        "epochs": 2,
        "optimizer": {"name": "adamw", "lr": 0.01, "weight_decay": 0.1, "eps": 1e-5},
        "lr_scale": {"rule": "linear", "base_batch_size": 4},
        "schedule": {"name": "cosine", "warmup": 2, "min_lr_ratio": 0.1},
        "clip": 0.5,
        "seed": 3,
    },
    "log": {"every": 1},
}

HIDES = """
import sys
class Hidden:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0].startswith("unipar"):
            raise ModuleNotFoundError(f"{name} is hidden")
sys.meta_path.insert(0, Hidden)
"""
"""Start of a script in which nothing of unipar can be imported."""

FORGETS = """
import runpy
for name in list(sys.modules):
    if name.partition(".")[0].startswith("unipar"):
        del sys.modules[name]
try:
    import unipar
except ModuleNotFoundError:
    sys.path.insert(0, "")
    runpy.run_path("train.py", run_name="__main__")
"""
"""Rest of a script that runs train.py in a process that has imported unipar before."""
