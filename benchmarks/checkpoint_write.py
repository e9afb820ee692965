"""Throughput of writing and verifying a checkpoint, beside plain writing and reading of the same bytes."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.timing import interleaved, interval
from unipar.backend import Region
from unipar.checkpoint.format.shard_file import ShardTensor, write_shard
from unipar.checkpoint.protocol.retention import Retention
from unipar.checkpoint.protocol.save_checkpoint import PieceToSave, save_checkpoint
from unipar.checkpoint.protocol.verifying import verify_checkpoint
from unipar.checkpoint.storage.disk import Disk
from unipar.utils.table import format_table

ROUNDS = 15
TENSORS, ELEMENTS = 20, 6_250_000
"""Tensors of fp32: 500 MB."""

GOAL = 0.8
"""Least throughput of a save, as a share of that of writing and flushing the same bytes plainly."""


class Arms:
    """Ways to write the same tensors into one folder, each replacing what it wrote before."""

    def __init__(self, folder: Path, tensors: int = TENSORS, elements: int = ELEMENTS) -> None:
        self.folder = folder
        self.tensors = {f"layer.{i}": torch.randn(elements) for i in range(tensors)}
        self.data = {name: tensor.view(torch.uint8).numpy().data for name, tensor in self.tensors.items()}
        self.bytes = sum(view.nbytes for view in self.data.values())
        self.elements = elements
        self.step = 0

    def write_plainly(self) -> None:
        """Write and flush the bytes, in one call for each tensor."""
        file = self._fresh("plain")
        number = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        for view in self.data.values():
            left = view
            while left:
                left = left[os.write(number, left) :]
        os.fsync(number)
        os.close(number)

    def write_one_shard(self) -> None:
        """Write, hash and flush one shard."""
        shape = (self.elements,)
        write_shard(Disk(), self._fresh("shard"), [ShardTensor(n, "F32", shape, v) for n, v in self.data.items()])

    def save(self) -> None:
        """Save a checkpoint as one rank does: shard, manifest, rename, deletion of the one before."""
        self.step += 1
        shape, where = (self.elements,), Region(0, self.elements)
        pieces = [PieceToSave(n, "weight", "F32", shape, where, v) for n, v in self.data.items()]
        save_checkpoint(self.folder / "checkpoints", self.step, pieces, {}, retention=Retention(keep=1))

    def save_by_torch(self) -> None:
        """Call torch.save, and flush."""
        with self._fresh("torch").open("xb") as file:
            torch.save(self.tensors, file)
            file.flush()
            os.fsync(file.fileno())

    def read_plainly(self) -> None:
        """Read the newest checkpoint's shard into a buffer, a megabyte at a time."""
        buffer = bytearray(2**20)
        with (self._newest() / "shards" / "rank-00000.safetensors").open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass

    def verify(self) -> None:
        """Verify the newest checkpoint, all hashes included."""
        verify_checkpoint(self._newest())

    def _newest(self) -> Path:
        return self.folder / "checkpoints" / f"step-{self.step:08d}"

    def _fresh(self, name: str) -> Path:
        file = self.folder / name
        file.unlink(missing_ok=True)
        return file


def measure_arms(arms: Arms, rounds: int) -> dict[str, dict[str, Any]]:
    """Return megabytes a second of each arm, and its throughput as a share of the plain one's, round by round."""
    found: dict[str, dict[str, Any]] = {}
    groups: tuple[dict[str, Callable[[], None]], ...] = (
        {
            "plain write, fsync": arms.write_plainly,
            "shard with hash": arms.write_one_shard,
            "checkpoint": arms.save,
            "torch.save, fsync": arms.save_by_torch,
        },
        {"plain read": arms.read_plainly, "verify": arms.verify},
    )
    for group in groups:
        interleaved(group, 1, 1, time.perf_counter)  # files and buffers are there
        seconds = interleaved(group, rounds, 1, time.perf_counter)
        plain = next(iter(seconds.values()))
        for name, took in seconds.items():
            rate = interval([arms.bytes / 1e6 / t for t in took])
            share = interval([base / mine for base, mine in zip(plain, took, strict=True)])
            found[name] = {"rate": asdict(rate), "share": asdict(share)}
    return found


def file_systems() -> dict[str, Path]:
    """Return a folder on a disk, and one in memory where there is one."""
    found = {"disk": Path(tempfile.gettempdir())}
    if os.access("/dev/shm", os.W_OK):
        found["tmpfs"] = Path("/dev/shm")
    return found


def benchmark_checkpoint_write() -> tuple[dict[str, Any], bool]:
    """Measure the throughput of a save on a disk and in memory, and of verifying it."""
    results: dict[str, Any] = {}
    rows: list[tuple[str, ...]] = []
    good = True
    for system, parent in file_systems().items():
        folder = Path(tempfile.mkdtemp(prefix="unipar-bench-", dir=parent))
        try:
            results[system] = measure_arms(Arms(folder), ROUNDS)
        finally:
            shutil.rmtree(folder)
        for name, told in results[system].items():
            share = told["share"]
            shown = f"{share['middle']:.2f} [{share['low']:.2f}..{share['high']:.2f}]"
            rows.append((system, name, f"{told['rate']['middle']:.0f}", shown))
        good = good and results[system]["checkpoint"]["share"]["middle"] >= GOAL
    header = ("500 MB, one process", "", "MB/s", "throughput / plain")
    print(format_table(header, rows, right=(2,)))
    print(f"a checkpoint at least {GOAL} of plain writing: {'met' if good else 'MISSED'}\n")
    return results, good
