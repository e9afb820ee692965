"""Small checkpoints for tests: written by two ranks as threads, whose disk can be made to fail."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from typing_extensions import override

from unipar.backend import Region
from unipar.checkpoint.protocol.retention import Retention
from unipar.checkpoint.protocol.save_checkpoint import (
    FrozenToSave,
    PieceToSave,
    SavedCheckpoint,
    save_checkpoint,
)
from unipar.checkpoint.storage.disk import Disk, OutputFile
from unipar.distributed.meeting.text_rounds import Decide, Judge
from unipar.utils.address import Address, Location

_Where = TypeVar("_Where", Path, Address)


def floats(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def pieces_of_rank(rank: int, step: int, world: int = 2) -> list[PieceToSave]:
    """Return a matrix of 4 x 6 over two ranks by columns, a bias on rank 0, a counter, an empty tensor, and a range."""
    if world == 1:
        return [*pieces_of_rank(0, step), *pieces_of_rank(1, step)]
    columns = floats(*(step + 6 * row + 3 * rank + column for row in range(4) for column in range(3)))
    made = [
        PieceToSave("net.weight", "weight", "F32", (4, 6), Region(3 * rank, 3, 6, 4), columns),
        PieceToSave("net.weight", "exp_avg", "F32", (4, 6), Region(12 * rank, 12), lambda: columns),
        PieceToSave("net.mask", "buffer", "BOOL", (5,), Region(3 * rank, 3 - rank), bytes([1, 0, 1][: 3 - rank])),
    ]
    if rank == 0:
        made += [
            PieceToSave("net.bias", "weight", "BF16", (3,), Region(0, 3), b"\x00\x3f" * 3),
            PieceToSave("net.weight", "step", "F32", (), Region(0, 1), floats(step)),
            PieceToSave("net.empty", "weight", "F64", (0, 4), Region(0, 0), b""),
        ]
    return made


def frozen_of_rank(rank: int) -> FrozenToSave:
    """Return a frozen table, of which each rank writes half."""
    return FrozenToSave(
        "frozen-0a1b2c3d", [PieceToSave("net.table", "weight", "F32", (2, 2), Region(2 * rank, 2), floats(rank, 1))]
    )


class Meeting:
    """Collective of ranks that are threads of this process."""

    def __init__(self, world: int) -> None:
        self._barrier = threading.Barrier(world, timeout=20)
        self._texts, self._told = [""] * world, ""

    def rounds(self, rank: int) -> Decide:
        def decide(mine: str, judge: Judge) -> str:
            self._texts[rank] = mine
            self._barrier.wait()
            if rank == 0:
                self._told = judge(list(self._texts))
            self._barrier.wait()
            return self._told

        return decide


def save_on_ranks(
    folder: Location,
    step: int,
    *,
    disks: Sequence[Disk] = (Disk(), Disk()),
    pieces: Callable[[int, int], Sequence[PieceToSave]] = pieces_of_rank,
    retention: Retention | None = None,
    state: dict[str, Any] | None = None,
    frozen: Callable[[int], FrozenToSave] | None = None,
) -> list[SavedCheckpoint | BaseException]:
    """Save as one rank for each disk does; return what each rank returned or raised."""
    meeting = Meeting(len(disks))

    def save(rank: int) -> SavedCheckpoint | BaseException:
        try:
            return save_checkpoint(
                folder,
                step,
                pieces(rank, step),
                (state or {"data": {"samples": 8 * step}}) if rank == 0 else None,
                rank=rank,
                decide=meeting.rounds(rank),
                retention=retention,
                disk=disks[rank],
                frozen=None if frozen is None else frozen(rank),
            )
        except Exception as e:
            return e

    with ThreadPoolExecutor(len(disks)) as pool:
        return list(pool.map(save, range(len(disks))))


def save_two_steps(folder: _Where) -> tuple[_Where, _Where]:
    """Return the folders of two checkpoints of equal size, of steps 1 and 2."""
    for step in (1, 2):
        for done in save_on_ranks(folder, step):
            assert isinstance(done, SavedCheckpoint), done
    return folder / "step-00000001", folder / "step-00000002"


class HookedDisk(Disk):
    """Disk that calls `before` with the name of each operation that can fail, and the last part of its path."""

    def __init__(self, before: Callable[[str, str], None]) -> None:
        self.before = before

    @override
    def create(self, path: Path) -> OutputFile:
        self.before("create", path.name)
        made = super().create(path)
        return _HookedFile(path, made, self.before)

    @override
    def make_folder(self, path: Path, mode: int = 0o777) -> None:
        self.before("make_folder", path.name)
        super().make_folder(path, mode)

    @override
    def make_parents(self, path: Path) -> None:
        self.before("make_parents", path.name)
        super().make_parents(path)

    @override
    def flush_folder(self, path: Path) -> None:
        self.before("flush_folder", path.name)
        super().flush_folder(path)

    @override
    def change_mode(self, path: Path, mode: int) -> None:
        self.before("change_mode", path.name)
        super().change_mode(path, mode)

    @override
    def rename(self, old: Path, new: Path) -> None:
        self.before("rename", new.name)
        super().rename(old, new)

    @override
    def exchange(self, one: Path, other: Path) -> bool:
        self.before("exchange", other.name)
        return super().exchange(one, other)

    @override
    def remove_tree(self, path: Path) -> None:
        self.before("remove_tree", path.name)
        super().remove_tree(path)

    @override
    def free_bytes(self, path: Path) -> int:
        self.before("free_bytes", path.name)
        return super().free_bytes(path)


class _HookedFile(OutputFile):
    """File of which each operation is announced; each write is done in two halves."""

    def __init__(self, path: Path, inner: OutputFile, before: Callable[[str, str], None]) -> None:
        super().__init__(path, -1)
        self._inner, self._before = inner, before
        self._half = False

    @override
    def write(self, data: memoryview) -> int:
        self._half = not self._half and len(data) > 1
        self._before("half of a write" if self._half else "write", self.path.name)
        return self._inner.write(data[: len(data) // 2] if self._half else data)

    @override
    def flush(self) -> None:
        self._before("flush", self.path.name)
        self._inner.flush()

    @override
    def close(self) -> None:
        self._inner.close()
