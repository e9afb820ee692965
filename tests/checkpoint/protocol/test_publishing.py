"""Saving on several ranks: what is published, what each failure leaves, and the sentence that all ranks raise."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from typing_extensions import override

from tests.support.checkpoints import (
    HookedDisk,
    floats,
    frozen_of_rank,
    pieces_of_rank,
    save_on_ranks,
    save_two_steps,
)
from unipar.backend import Region
from unipar.checkpoint.format.shard_file import ShardReader
from unipar.checkpoint.protocol.retention import Retention
from unipar.checkpoint.protocol.save_checkpoint import FrozenToSave, PieceToSave, SavedCheckpoint, save_checkpoint
from unipar.checkpoint.protocol.verifying import find_checkpoints, verify_checkpoint
from unipar.checkpoint.storage.disk import Disk
from unipar.distributed.meeting.text_rounds import Judge
from unipar.errors import CheckpointError

Pieces = Callable[[int, int], Sequence[PieceToSave]]


class FailingDisk(HookedDisk):
    """Disk whose operation number `fails_at` raises an error; `done` holds the operations so far."""

    def __init__(self, fails_at: int | None = None) -> None:
        super().__init__(self._count)
        self.fails_at = fails_at
        self.done: list[str] = []

    def _count(self, operation: str, name: str) -> None:
        self.done.append(f"{operation} {name}")
        if len(self.done) - 1 == self.fails_at:
            raise OSError(errno.EIO, os.strerror(errno.EIO), name)


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def sentences(outcomes: Sequence[SavedCheckpoint | BaseException]) -> set[str]:
    """Return the sentences of ranks, all of which must have raised CheckpointError."""
    assert [type(outcome) for outcome in outcomes] == [CheckpointError] * len(outcomes)
    return {str(outcome) for outcome in outcomes}


def test_two_ranks_save_one_checkpoint(tmp_path: Path) -> None:
    """The manifest has each tensor once, with a piece from each rank that holds some of it."""
    first, second = save_on_ranks(tmp_path / "a" / "b", 42, state={"data": {"samples": 336}})
    assert isinstance(first, SavedCheckpoint)
    assert first == second
    assert isinstance(first.path, Path)
    assert first.path == tmp_path / "a" / "b" / "step-00000042"
    checkpoint = verify_checkpoint(first.path)
    assert checkpoint.state == {"data": {"samples": 336}, "format": 1, "step": 42}
    assert checkpoint.manifest.bytes == first.bytes
    zero, one = "shards/rank-00000.safetensors", "shards/rank-00001.safetensors"
    assert {
        f"{tensor}": (tensor.dtype, tensor.shape, [(piece.file, piece.key, *piece.where) for piece in tensor.pieces])
        for tensor in checkpoint.manifest.tensors.values()
    } == {
        "net.weight (weight)": (
            "F32",
            (4, 6),
            [(zero, "weight:net.weight:0", 0, 3, 6, 4), (one, "weight:net.weight:3", 3, 3, 6, 4)],
        ),
        "net.weight (exp_avg)": (
            "F32",
            (4, 6),
            [(zero, "exp_avg:net.weight:0", 0, 12, 0, 1), (one, "exp_avg:net.weight:12", 12, 12, 0, 1)],
        ),
        "net.mask (buffer)": (
            "BOOL",
            (5,),
            [(zero, "buffer:net.mask:0", 0, 3, 0, 1), (one, "buffer:net.mask:3", 3, 2, 0, 1)],
        ),
        "net.bias (weight)": ("BF16", (3,), [(zero, "weight:net.bias", 0, 3, 0, 1)]),
        "net.weight (step)": ("F32", (), [(zero, "step:net.weight", 0, 1, 0, 1)]),
        "net.empty (weight)": ("F64", (0, 4), []),
    }
    with ShardReader(first.path, one) as shard:
        data = bytearray(12)
        shard.read_tensor_into("weight:net.weight:3", 12, data)
        assert data == floats(51, 52, 53)  # the second row's second half, of step 42
    assert names(tmp_path / "a" / "b") == ["step-00000042"]
    assert (first.path.stat().st_mode & 0o777) == (tmp_path / "a" / "b").stat().st_mode & 0o777


def test_a_rank_with_many_tensors_writes_several_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most so many keys go into one file as a reader takes."""
    monkeypatch.setattr("unipar.checkpoint.protocol.save_checkpoint.MOST_KEYS", 2)
    saved = save_checkpoint(tmp_path, 1, pieces_of_rank(0, 1, world=1), {})
    assert isinstance(saved.path, Path)
    assert names(saved.path / "shards") == [
        "rank-00000-001.safetensors",
        "rank-00000-002.safetensors",
        "rank-00000-003.safetensors",
        "rank-00000.safetensors",
    ]
    verify_checkpoint(saved.path)


def test_pieces_that_would_have_one_key_have_two(tmp_path: Path) -> None:
    """A tensor may be called like the piece of another."""
    pieces = [
        PieceToSave("w", "weight", "U8", (4,), Region(3, 1), b"d"),
        PieceToSave("w", "weight", "U8", (4,), Region(0, 3), b"abc"),
        PieceToSave("w:3", "weight", "U8", (2,), Region(0, 2), b"xy"),
    ]
    checkpoint = verify_checkpoint(save_checkpoint(tmp_path, 1, pieces, None).path)
    assert [p.key for p in checkpoint.manifest.tensors["w:3", "weight"].pieces] == ["weight:w:3+"]


def test_the_same_step_again_replaces_the_first(tmp_path: Path) -> None:
    """As after a resume from an older checkpoint: at no moment is there none of that name."""
    seen: list[bool] = []
    path = tmp_path / "step-00000003"
    save_on_ranks(tmp_path, 3, state={"try": 1})
    disk = HookedDisk(lambda operation, name: seen.append(path.exists()))
    save_on_ranks(tmp_path, 3, state={"try": 2}, disks=(disk, Disk()))
    assert set(seen) == {True}
    assert verify_checkpoint(path).state["try"] == 2
    assert names(tmp_path) == ["step-00000003"]


def test_a_file_system_that_cannot_swap_names_replaces_too(tmp_path: Path) -> None:
    """With two renames."""

    class Plain(Disk):
        @override
        def exchange(self, one: Path, other: Path) -> bool:
            return False

    for number in (1, 2):
        save_checkpoint(tmp_path, 3, pieces_of_rank(0, 3, world=1), {"try": number}, disk=Plain())
    assert verify_checkpoint(tmp_path / "step-00000003").state["try"] == 2
    save_checkpoint(tmp_path, 4, pieces_of_rank(0, 4, world=1), {}, disk=Plain())
    assert names(tmp_path) == ["step-00000003", "step-00000004"]


def changed(rank: int, step: int) -> list[PieceToSave]:
    """Return pieces of which the second rank's first has another dtype."""
    return [
        piece._replace(dtype="I32") if rank and i == 0 else piece for i, piece in enumerate(pieces_of_rank(rank, step))
    ]


def doubled(rank: int, step: int) -> list[PieceToSave]:
    """Return pieces of which both ranks write the same range."""
    return [
        piece._replace(where=Region(0, 12)) if piece.kind == "exp_avg" else piece
        for piece in pieces_of_rank(rank, step)
    ]


def halved(rank: int, step: int) -> list[PieceToSave]:
    """Return pieces of which the second rank's are missing."""
    return [] if rank else pieces_of_rank(rank, step)


def wrong_size(rank: int, step: int) -> list[PieceToSave]:
    """Return pieces of which one has too few bytes on the second rank."""
    return [
        piece._replace(data=b"12") if rank and i == 1 else piece for i, piece in enumerate(pieces_of_rank(rank, step))
    ]


def raising(rank: int, step: int) -> list[PieceToSave]:
    """Return pieces of which one cannot be read on the second rank."""

    def data() -> bytes:
        raise RuntimeError("CUDA error: device-side assert triggered")

    return [
        piece._replace(data=data) if rank and i == 1 else piece for i, piece in enumerate(pieces_of_rank(rank, step))
    ]


@pytest.mark.parametrize(
    ("pieces", "reason"),
    [
        (
            changed,
            "rank 0: net.weight (weight) is F32 of shape [4, 6] on rank 0, and I32 of shape [4, 6] on rank 1",
        ),
        (
            doubled,
            "rank 0: what the ranks wrote: net.weight (exp_avg), of shape [4, 6]: 'exp_avg:net.weight:0' in "
            "shards/rank-00000.safetensors and 'exp_avg:net.weight:0' in shards/rank-00001.safetensors overlap",
        ),
        (
            halved,
            "rank 0: what the ranks wrote: net.weight (weight), of shape [4, 6]: its pieces hold 12 of 24 elements",
        ),
        (wrong_size, "rank 1: exp_avg:net.weight:12 has 2 bytes; F32 of shape [12] is 48"),
        (raising, "rank 1: RuntimeError: CUDA error: device-side assert triggered"),
    ],
)
def test_ranks_that_contradict_one_another_publish_nothing(tmp_path: Path, pieces: Pieces, reason: str) -> None:
    """All ranks raise the same sentence; the checkpoint that was there stays, and no temporary folder."""
    save_on_ranks(tmp_path, 1)
    outcomes = save_on_ranks(tmp_path, 2, pieces=pieces)
    assert sentences(outcomes) == {
        f"checkpoint of step 2 in {tmp_path}: {reason}; it is not published; those of other steps are as they were"
    }
    assert names(tmp_path) == ["step-00000001"]
    verify_checkpoint(tmp_path / "step-00000001")


def test_a_state_that_json_cannot_hold_is_refused_on_all_ranks(tmp_path: Path) -> None:
    """Before anything is written."""
    outcomes = save_on_ranks(tmp_path / "a", 2, state={"best": {"loss": float("nan")}})
    assert sentences(outcomes) == {
        f"checkpoint of step 2 in {tmp_path}/a: rank 0: state.json: best.loss is nan, which JSON has no word for; "
        "it is not published; those of other steps are as they were"
    }
    assert names(tmp_path) == []


def test_too_little_space_is_said_before_anything_is_written(tmp_path: Path) -> None:
    """With both numbers."""

    class Small(Disk):
        @override
        def free_bytes(self, path: Path) -> int:
            return 900

    outcomes = save_on_ranks(tmp_path, 2, disks=(Small(), Disk()))
    assert sentences(outcomes) == {
        f"checkpoint of step 2 in {tmp_path}: rank 0: it needs 987 B and 900 B are free: free some space, keep "
        "fewer checkpoints, or save elsewhere; it is not published; those of other steps are as they were"
    }
    assert names(tmp_path) == []


Frozen = Callable[[int], FrozenToSave]


def operations(tmp_path: Path, frozen: Frozen | None) -> list[list[str]]:
    """Return what each rank's disk does in a save that replaces nothing and deletes one old checkpoint."""
    disks = [FailingDisk(), FailingDisk()]
    save_two_steps(tmp_path)
    for outcome in save_on_ranks(tmp_path, 3, disks=disks, retention=Retention(keep=2), frozen=frozen):
        assert isinstance(outcome, SavedCheckpoint)
    return [disk.done for disk in disks]


@pytest.mark.parametrize(("frozen", "count"), [(None, (38, 11)), (frozen_of_rank, (47, 18))])
def test_an_error_at_any_operation_leaves_the_old_checkpoints(
    tmp_path: Path, frozen: Frozen | None, count: tuple[int, int]
) -> None:
    """EIO at each call of each rank: one sentence on both, nothing half published, and the next save clears up.

    After the rename the new checkpoint is there, and what fails is told: as an error, or, in deleting, as a remark.
    """
    done = operations(tmp_path / "count", frozen)
    save_two_steps(tmp_path / "saved")
    rename = next(i for i, operation in enumerate(done[0]) if operation == "rename step-00000003")
    assert (len(done[0]), len(done[1])) == count
    for rank, mine in enumerate(done):
        for number, operation in enumerate(mine):
            folder = tmp_path / f"{rank}-{number}"
            shutil.copytree(tmp_path / "saved", folder)
            disks = [FailingDisk(number if rank == failing else None) for failing in range(2)]
            outcomes = save_on_ranks(folder, 3, disks=disks, retention=Retention(keep=2), frozen=frozen)
            published = rank == 0 and number > rename
            for found in find_checkpoints(folder):
                verify_checkpoint(found.path)
            assert [found.step for found in find_checkpoints(folder)][:2] == ([3, 2] if published else [2, 1]), (
                operation
            )
            if published and operation != "flush_folder count":
                assert {type(outcome) for outcome in outcomes} == {SavedCheckpoint}, operation
            else:
                (sentence,) = sentences(outcomes)
                assert f"rank {rank}: " in sentence
                assert "Input/output error" in sentence
            for outcome in save_on_ranks(folder, 4, retention=Retention(keep=1)):
                assert isinstance(outcome, SavedCheckpoint)
            assert names(folder) == ["step-00000004"]


def test_an_error_after_the_rename_says_so(tmp_path: Path) -> None:
    """The checkpoint is there, and whole."""

    def fail_after_the_rename(operation: str, name: str) -> None:
        if operation == "flush_folder" and name == tmp_path.name:
            raise OSError(errno.EIO, "Input/output error")

    disk = HookedDisk(fail_after_the_rename)
    outcomes = save_on_ranks(tmp_path, 1, disks=(disk, Disk()))
    assert sentences(outcomes) == {
        f"checkpoint of step 1 in {tmp_path}: rank 0: Input/output error; it is published, but a power failure may "
        "undo that; those of other steps are as they were"
    }
    (found,) = find_checkpoints(tmp_path)
    assert verify_checkpoint(found.path).manifest.step == 1


def test_a_rank_that_dies_ends_the_save(tmp_path: Path) -> None:
    """The caller's collective raises, and rank 0 leaves nothing behind."""
    calls = 0

    def decide(mine: str, judge: Judge) -> str:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise ConnectionError("rank 1 is gone")
        return judge([mine, json.dumps({"result": 0})])

    with pytest.raises(ConnectionError, match="rank 1 is gone"):
        save_checkpoint(tmp_path, 1, pieces_of_rank(0, 1), {}, decide=decide)
    assert names(tmp_path) == []


def test_what_a_killed_save_left_beside_goes_before_room_is_counted(tmp_path: Path) -> None:
    """Its frozen weights may be larger than what is to be written."""
    left, seen = tmp_path / "frozen-00000000", list[bool]()
    (left / "inside").mkdir(parents=True)
    disk = HookedDisk(lambda operation, name: seen.append(left.exists()) if operation == "free_bytes" else None)
    save_on_ranks(tmp_path, 1, disks=(disk, Disk()))
    assert seen == [False]
    assert names(tmp_path) == ["step-00000001"]
