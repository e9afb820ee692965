"""Measurements of one rank, which all ranks of a calibration do together."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

from unipar.utils.text import format_size


@dataclass(frozen=True)
class CalibrationSizes:
    """Sizes of what is measured."""

    matrix: tuple[int, ...]
    """Rows and columns of matrices."""

    block: tuple[int, int]
    """Width of a block of a transformer, and its tokens."""

    copied: int
    """Bytes that are read and written for the bandwidth of memory."""

    messages: tuple[int, ...]
    """Bytes of collectives, the smallest first."""

    repeats: int = 7


CPU_SIZES: Final = CalibrationSizes((256, 512, 1024), (256, 512), 1 << 26, (1 << 12, 1 << 16, 1 << 20, 1 << 24))
CUDA_SIZES: Final = CalibrationSizes(
    (2048, 4096, 8192), (4096, 8192), 1 << 30, (1 << 12, 1 << 20, 1 << 24, 1 << 28), repeats=20
)

_LONGEST_ERROR = 2000
"""Characters of an error that are told."""


def measure_as_rank(rank: int, ranks: int, device: str, folder: str, sizes: CalibrationSizes, sender: Any) -> None:
    """Measure as one of the ranks; rank 0 sends what it finds."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its ranks
    try:
        bench = RankMeasurements(rank, ranks, device, folder, sizes, sender if rank == 0 else None)
        result = bench.run()
        if rank == 0:
            sender.send(("result", json.dumps(result)))
    except Exception as e:
        # The error of the rank that failed comes before those of ranks that have lost it. A short message is written
        # to the pipe in one piece, whichever ranks write at that time.
        sender.send(("error", f"{type(e).__name__}: {e}"[:_LONGEST_ERROR]))
        raise SystemExit(1) from None


class RankMeasurements:
    """Measurements of one rank, which all ranks do together."""

    def __init__(self, rank: int, ranks: int, device: str, folder: str, sizes: CalibrationSizes, sender: Any) -> None:
        import torch
        import torch.distributed as dist

        from unipar.distributed.device import select_device, transport_of

        self._ranks, self._sizes, self._sender = ranks, sizes, sender
        self._device = torch.device("cpu") if device == "cpu" else select_device(device, rank)
        if device == "cpu":
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))
        dist.init_process_group(
            transport_of(self._device),
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=ranks,
            device_id=None if device == "cpu" else self._device,
        )

    def run(self) -> dict[str, Any]:
        import torch
        import torch.distributed as dist

        flops: dict[str, float] = {}
        block: dict[str, float] = {}
        for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp64", torch.float64)):
            flops[name] = max(self._matrix_rate(size, dtype) for size in self._sizes.matrix)
            block[name] = self._block_rate(dtype)
            self._tell(
                f"{name}: {flops[name] / 1e9:,.0f} GFLOP/s in products of matrices, "
                f"{block[name] / 1e9:,.0f} in a block of a transformer"
            )
        bandwidth = self._bandwidth()
        self._tell(f"memory: {bandwidth / 1e9:,.1f} GB/s")
        operation = self._operation()
        self._tell(f"a small operation: {operation * 1e6:.1f} us")
        measurements: dict[str, Any] = {"flops": flops, "block": block, "bandwidth": bandwidth, "operation": operation}
        measurements |= {"memory": self._memory(), "what": self._what()}
        if self._ranks > 1:
            measurements["collectives"] = {
                kind: self._collective(kind) for kind in ("all_reduce", "all_gather", "reduce_scatter")
            }
            measurements["hides"] = self._hidden_share()
            self._tell(f"computing goes on beside a collective for {max(0.0, measurements['hides']):.0%} of its time")
        dist.destroy_process_group()
        return measurements

    def _tell(self, text: str) -> None:
        if self._sender is not None:
            self._sender.send(("told", text))

    def _seconds(self, do: Callable[[], object]) -> float:
        """Return the median of the seconds of a call, which all ranks begin together."""
        import torch
        import torch.distributed as dist

        do()
        durations: list[float] = []
        for _ in range(self._sizes.repeats):
            self._wait()
            dist.barrier()
            began = time.perf_counter()
            do()
            self._wait()
            durations.append(time.perf_counter() - began)
        seconds = torch.tensor(median(durations), dtype=torch.float64, device=self._device)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        return seconds.item()

    def _wait(self) -> None:
        from unipar.distributed.device import synchronize

        synchronize(self._device)

    def _matrix_rate(self, size: int, dtype: Any) -> float:
        import torch

        a, b = (torch.randn(size, size, device=self._device).to(dtype) for _ in range(2))
        return 2 * size**3 / self._seconds(lambda: torch.mm(a, b))

    def _block_rate(self, dtype: Any) -> float:
        """Return the operations a second of forward and backward of a block's feed-forward part, with its norm.

        In 16 bits it is fp32 under autocast.
        """
        import torch
        from torch import nn

        width, tokens = self._sizes.block
        mixed = dtype in (torch.bfloat16, torch.float16)
        held = torch.float32 if mixed else dtype
        model = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        ).to(self._device, held)
        x = torch.randn(tokens, width, device=self._device, dtype=held, requires_grad=True)

        def both_ways() -> None:
            with torch.autocast(self._device.type, dtype, enabled=mixed):
                y = model(x)
            y.sum().backward()

        return 3 * 2 * tokens * 8 * width**2 / self._seconds(both_ways)

    def _bandwidth(self) -> float:
        import torch

        x = torch.ones(self._sizes.copied // 4, device=self._device)
        y = torch.empty_like(x)
        return 2 * x.nbytes / self._seconds(lambda: y.copy_(x))

    def _operation(self) -> float:
        import torch

        x, number = torch.ones(64, device=self._device, requires_grad=True), 200

        def chain() -> None:
            y = x
            for _ in range(number):
                y = y * 1.5
            y.sum().backward()

        return self._seconds(chain) / (2 * number)

    def _collective(self, kind: str) -> list[tuple[int, float]]:
        points = [(size, self._seconds(self._call(kind, size))) for size in self._sizes.messages]
        (_, first), (largest, last) = points[0], points[-1]
        self._tell(f"{kind}: {first * 1e6:,.0f} us, {format_size(largest)} in {last * 1e3:,.1f} ms")
        return points

    def _call(self, kind: str, size: int) -> Callable[[], object]:
        import torch
        import torch.distributed

        dist: Any = torch.distributed
        tensor = torch.ones(size // 4, device=self._device)
        part = torch.ones(size // 4 // self._ranks, device=self._device)
        if kind == "all_reduce":
            return lambda: dist.all_reduce(tensor)
        parts = list(tensor.chunk(self._ranks))
        if kind == "all_gather":
            return lambda: dist.all_gather(parts, part)
        return lambda: dist.reduce_scatter(part, parts)

    def _hidden_share(self) -> float:
        """Return for which share of the shorter of two, a collective and a product, both go on at once."""
        import torch
        import torch.distributed

        dist: Any = torch.distributed
        tensor = torch.ones(self._sizes.messages[-1] // 4, device=self._device)
        a = torch.randn(self._sizes.matrix[-1], self._sizes.matrix[-1], device=self._device)
        alone = self._seconds(lambda: dist.all_reduce(tensor))
        product = self._seconds(lambda: torch.mm(a, a))
        number = max(1, round(alone / product))

        def both() -> None:
            pending: Any = dist.all_reduce(tensor, async_op=True)
            for _ in range(number):
                torch.mm(a, a)
            pending.wait()

        together = self._seconds(both)
        return (alone + number * product - together) / min(alone, number * product)

    def _memory(self) -> int:
        from unipar.distributed.device import free_and_total_bytes, has_own_memory

        if has_own_memory(self._device):
            return free_and_total_bytes(self._device)[1]
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // self._ranks

    def _what(self) -> str:
        import torch

        from unipar.distributed.device import device_name, has_own_memory

        if has_own_memory(self._device):
            return device_name(self._device)
        return f"{os.cpu_count()} cores, {torch.get_num_threads()} for each of {self._ranks} ranks"
