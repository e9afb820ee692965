"""Memory of two ranks that begin from a folder of weights, or go on from a checkpoint: peak before the first forward.

python -m benchmarks.weights_memory [millions of parameters]
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from typing_extensions import override

import unipar
from unipar.run_folder.layout import run_log_path
from unipar.run_folder.run_log import RunLog
from unipar.utils.procfs import peak_resident_bytes
from unipar.utils.text import format_size

WIDTH, FILES = 1024, 8


class Stack(unipar.Task):
    """Blocks of two matrices each; the first loss writes down the peak memory so far, and the run ends after it."""

    def __init__(self, blocks: int, told: str) -> None:
        self.blocks_, self.told = blocks, told

    @override
    def model(self) -> nn.Module:
        return nn.Sequential(*(_block() for _ in range(self.blocks_)))

    @override
    def data(self) -> Any:
        return TensorDataset(torch.ones(4, WIDTH))

    @override
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        rank = torch.distributed.get_rank()
        file = Path(self.told) / f"peak-{rank}"
        if not file.exists():
            file.write_text(str(peak_resident_bytes()), "utf-8")
        return model(batch[0]).square().mean()


def _block() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


def write_weights(folder: Path, blocks: int) -> int:
    """Write a folder as transformers does, one file at a time; return the bytes of its tensors."""
    folder.mkdir()
    placed: dict[str, str] = {}
    size = 0
    for part in range(FILES):
        file = f"model-{part + 1:05d}-of-{FILES:05d}.safetensors"
        tensors: dict[str, Tensor] = {}
        for number in range(part, blocks, FILES):
            for at, shape in ((0, (4 * WIDTH, WIDTH)), (2, (WIDTH, 4 * WIDTH))):
                tensors[f"{number}.{at}.weight"] = torch.full(shape, 1e-4)
                tensors[f"{number}.{at}.bias"] = torch.zeros(shape[0])
        save_file(tensors, folder / file)
        placed |= dict.fromkeys(tensors, file)
        size += sum(t.nbytes for t in tensors.values())
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}), "utf-8")
    return size


def measure(
    folder: Path,
    strategy: str,
    blocks: int,
    *,
    weights: Path | None = None,
    saves: bool = False,
    resume: Path | None = None,
) -> list[tuple[int, int]]:
    """Return each rank's peak before the first forward, and the bytes that it read; the run is in a new `folder`."""
    out, told = folder / "run", folder.parent / "told"  # told is in the config, so it stays for a run that goes on
    shutil.rmtree(told, ignore_errors=True)
    told.mkdir()
    unipar.launch(
        {
            "backend": strategy.split("/")[0],
            "device": "cpu",
            "model": {"weights": None if weights is None else str(weights)},
            "checkpoint": {"keep": 1} if saves else None,
            "resume": "never" if resume is None else str(resume),
            "parallel": {"data": 2, "shard": strategy.split("/")[1]},
            "batch": {"total": 4, "micro": 2},
            "train": {"steps": 1 if resume is None else 2, "optimizer": {"name": "sgd", "lr": 1e-9}},
            "task": {"use": "benchmarks.weights_memory:Stack", "args": {"blocks": blocks, "told": str(told)}},
            "out": str(out),
            "launch": {"heartbeat": 300, "timeout": 600},
        },
        quiet=True,
    )
    read = [
        sum(row["bytes"] for row in RunLog.read(run_log_path(out, rank)) if row["event"] in ("weights read", "resumed"))
        for rank in range(2)
    ]
    return [(int((told / f"peak-{rank}").read_text("utf-8")), read[rank]) for rank in range(2)]


def main() -> None:
    """Print a table: strategy, peak of each rank, bytes read."""
    millions = int(sys.argv[1]) if len(sys.argv) > 1 else 400
    blocks = max(2, round(millions * 1e6 / (8 * WIDTH * WIDTH)))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        weights = folder / "weights"
        size = write_weights(weights, blocks)
        base = measure(folder / "empty", "native/nothing", 2)[0][0]
        print(f"weights: {format_size(size)} in {FILES} files; a rank without a model: {format_size(base)}")

        def show(strategy: str, how: str, found: Sequence[tuple[int, int]]) -> None:
            for rank, (peak, read) in enumerate(found):
                above = f"{(peak - base) / size:.2f} of the weights above that"
                print(
                    f"{strategy:22} {how:13} rank {rank}: peak {format_size(peak)}, {above}; read {format_size(read)}"
                )

        for strategy in ("native/parameters", "deepspeed/parameters", "native/nothing"):
            name = strategy.replace("/", "-")
            begun = measure(folder / name, strategy, blocks, weights=weights, saves=strategy == "native/parameters")
            show(strategy, "model.weights", begun)
        saved = folder / "native-parameters" / "run" / "checkpoints" / "step-00000001"
        for strategy in ("native/parameters", "deepspeed/parameters", "native/nothing"):
            show(
                strategy,
                "resume",
                measure(folder / f"{strategy.replace('/', '-')}-again", strategy, blocks, resume=saved),
            )


if __name__ == "__main__":
    main()
