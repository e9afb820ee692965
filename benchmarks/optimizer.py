"""Time and memory of two ways to shard the optimizer's states alone: `python -m benchmarks.optimizer`."""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from unipar_native import ZERO_OPTIMIZER_SETTINGS

from benchmarks.gpt import config_of
from benchmarks.worlds import read_asked, run_world, write_found
from unipar.backend import registry
from unipar.distributed.place import Place
from unipar.utils.table import format_table

WIDTH, DEPTH, MICROS, WARM, ROUNDS = 384, 8, 4, 2, 8
WAYS = ("DDP", "ZeroRedundancyOptimizer", "FSDP2 kept gathered")
Sync = Callable[[bool], Any]


def _prepare_ddp(model: nn.Module, *, split: bool) -> tuple[nn.Module, Any, Sync]:
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    settings: dict[str, Any] = {"lr": 1e-3, "fused": True}
    optimizer: Any = (
        ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **ZERO_OPTIMIZER_SETTINGS, **settings)
        if split
        else torch.optim.AdamW(model.parameters(), **settings)
    )
    return ddp, optimizer, lambda last: nullcontext() if last else ddp.no_sync()


def _prepare_fsdp2(model: Any) -> tuple[nn.Module, Any, Sync]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model[:-1]:
        fully_shard(block, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    groups = [m for m in model.modules() if isinstance(m, FSDPModule)]

    def sync(last: bool) -> Any:
        for group in groups:
            group.set_requires_gradient_sync(last, recurse=False)
            group.set_reshard_after_backward(last, recurse=False)
        return nullcontext()

    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), sync


def _block() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


def _read_memory_status(key: str) -> int:
    lines = Path("/proc/self/status").read_text("ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def measure(place: Place, run: Path, control: socket.socket | None) -> None:
    """Measure one way in a world of its own; entry function of the workers."""
    way = read_asked(run)
    registry.find_backend("native").join(config_of("native/nothing", place.size), place)
    torch.manual_seed(0)
    before = _read_memory_status("VmRSS")
    model = nn.Sequential(*[_block() for _ in range(DEPTH)], nn.Linear(WIDTH, 1))
    prepared = _prepare_fsdp2(model) if way == WAYS[2] else _prepare_ddp(model, split=way == WAYS[1])
    wrapped, optimizer, sync = prepared
    batch = torch.randn(16, WIDTH)
    seconds: list[float] = []
    for i in range(WARM + ROUNDS):
        if i == WARM:
            Path("/proc/self/clear_refs").write_text("5", "ascii")  # resets VmHWM, the peak
        dist.barrier()
        began = time.perf_counter()
        for micro in range(1, MICROS + 1):
            with sync(micro == MICROS):
                loss: Tensor = wrapped(batch).square().mean()
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - began)
    if place.rank == 0:
        found = {"seconds": statistics.median(seconds[WARM:]), "bytes": _read_memory_status("VmHWM") - before}
        write_found(run, found)


def main() -> None:
    """Print time and memory of each way."""
    parameters = DEPTH * (2 * WIDTH + 8 * WIDTH**2 + 5 * WIDTH) + WIDTH + 1
    rows: list[tuple[str, ...]] = []
    for way in WAYS:
        turns = [run_world("benchmarks.optimizer:measure", size=2, asked=way) for _ in range(2)]
        took = " ".join(f"{turn['seconds'] * 1e3:.0f}" for turn in turns)
        peak = " ".join(f"{turn['bytes'] / parameters:.1f}" for turn in turns)
        rows.append((way, took, peak))
    print(f"two ranks, {parameters / 1e6:.1f}M parameters, AdamW, {MICROS} microbatches; two worlds each")
    print(format_table(("way", "ms a step", "peak, bytes a parameter"), rows, right=(1, 2)))


if __name__ == "__main__":
    main()
