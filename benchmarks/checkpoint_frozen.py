"""Checkpoints of adapters over a frozen model: bytes and times of each save, as copies and by reference, and an export.

python -m benchmarks.checkpoint_frozen [millions of frozen parameters]
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from typing_extensions import override

import unipar
from unipar.run_folder.layout import run_log_path
from unipar.run_folder.run_log import RunLog
from unipar.utils.table import format_table
from unipar.utils.text import format_duration, format_size

WIDTH, RANK = 2048, 8
STRATEGIES = ("native/nothing", "native/parameters")
FILE = "500MB"
"""Largest file of the export."""


class Adapted(nn.Module):
    """A frozen bf16 matrix with an adapter of two narrow ones in fp32, as LoRA has it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16).requires_grad_(requires_grad=False)
        self.a, self.b = nn.Linear(WIDTH, RANK, bias=False), nn.Linear(RANK, WIDTH, bias=False)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return x + 0.01 * F.linear(x.bfloat16(), self.base.weight).float() + self.b(self.a(x))


class Adapters(unipar.Task):
    """Adapters over a stack of frozen matrices."""

    def __init__(self, blocks: int) -> None:
        self.count = blocks

    @override
    def model(self) -> nn.Module:
        return nn.Sequential(*(Adapted() for _ in range(self.count)))

    @override
    def data(self) -> Any:
        return TensorDataset(torch.ones(64, WIDTH))

    @override
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return model(batch[0]).square().mean()


def save_rows(blocks: int, strategy: str, frozen: str, out: Path) -> list[dict[str, Any]]:
    """Train three steps on two ranks, with a save after each; return the run log's rows on the saves."""
    backend, _, shard = strategy.partition("/")
    config = {
        "task": {"use": f"{Path(__file__).resolve()}:Adapters", "args": {"blocks": blocks}},
        "backend": backend,
        "device": "cpu",
        "parallel": {"data": 2, "shard": shard},
        "batch": {"total": 2},
        "train": {"steps": 3, "optimizer": {"name": "adamw", "lr": 1e-4}},
        "checkpoint": {"every": 1, "keep": 1, "frozen": frozen},
        "out": str(out),
    }
    unipar.launch(config, quiet=True, overwrite=True)
    return [row for row in RunLog.read(run_log_path(out, 0)) if row["event"] == "checkpoint"]


def _table(blocks: int, folder: Path) -> Iterator[list[str]]:
    for strategy in STRATEGIES:
        for frozen in ("copy", "reference"):
            rows = save_rows(blocks, strategy, frozen, folder / "run")
            for row in (rows[0], rows[-1]):
                number = "first" if row is rows[0] else "third"
                times = [format_duration(row[key]) for key in ("waited", "seconds")]
                yield [strategy, frozen, number, f"{row['bytes']:,}", *times]


def _export_peak(checkpoint: Path, out: Path) -> str:
    """Export in a process of its own; return what it prints, and the seconds that it took."""
    began = time.monotonic()
    command = [sys.executable, "-m", "unipar", "checkpoint", "export", str(checkpoint), "--to", "hf", "--size", FILE]
    told = subprocess.run([*command, "-o", str(out)], check=True, capture_output=True, text=True).stdout
    return f"{told.strip()}; {format_duration(time.monotonic() - began)}"


def main() -> None:
    """Print the table of saves, then the peak memory of an export."""
    blocks = round(int(sys.argv[1] if len(sys.argv) > 1 else 1000) * 1e6 / WIDTH**2)
    print(f"{format_size(blocks * WIDTH**2 * 2)} of frozen bf16 weights in {blocks} matrices, two ranks")
    folder = Path(tempfile.mkdtemp(prefix="unipar-frozen-"))
    try:
        header = ["strategy", "frozen", "save", "bytes written", "training waited", "until published"]
        print(format_table(header, list(_table(blocks, folder)), right=(3, 4, 5), width=100))
        print(_export_peak(folder / "run", folder / "hf"))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
