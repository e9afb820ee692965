"""Which checkpoints stay, and what of dead writers is deleted."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest
from typing_extensions import override

from tests.support.checkpoints import pieces_of_rank
from unipar.checkpoint.protocol import retention as retention_module
from unipar.checkpoint.protocol.retention import ABANDONED_SECONDS, Retention, sweep_abandoned, temporary_name
from unipar.checkpoint.protocol.save_checkpoint import SavedCheckpoint, save_checkpoint
from unipar.checkpoint.protocol.verifying import find_checkpoints
from unipar.checkpoint.storage.disk import Disk


def save(folder: Path, step: int, retention: Retention) -> SavedCheckpoint:
    return save_checkpoint(folder, step, pieces_of_rank(0, step, world=1), {}, retention=retention)


def steps(folder: Path) -> list[int]:
    return [found.step for found in find_checkpoints(folder)]


def test_the_newest_stay_and_the_protected(tmp_path: Path) -> None:
    """Two newest, and the best."""
    removed = [save(tmp_path, step, Retention(keep=2, protected=(2,))).removed for step in range(1, 6)]
    assert removed == [(), (), (1,), (), (3,)]
    assert steps(tmp_path) == [5, 4, 2]
    assert save(tmp_path, 6, Retention(keep=1)).removed == (5, 4, 2)


def test_the_one_just_saved_stays_though_others_are_newer(tmp_path: Path) -> None:
    """After going on from an older checkpoint than the newest."""
    for step in (10, 20, 30):
        save(tmp_path, step, Retention(keep=3))
    assert save(tmp_path, 15, Retention(keep=1)).removed == (20, 10)
    assert steps(tmp_path) == [30, 15]


def test_a_broken_one_does_not_count(tmp_path: Path) -> None:
    """Two whole ones stay; the broken one between them is told."""
    for step in (1, 2, 3):
        save(tmp_path, step, Retention())
    (tmp_path / "step-00000003" / "state.json").unlink()
    saved = save(tmp_path, 4, Retention(keep=2))
    assert steps(tmp_path) == [4, 3, 2]
    assert saved.removed == (1,)
    assert saved.remarks == (
        f"{tmp_path}/step-00000003/state.json: missing, though manifest.json lists it; it does not count as kept",
    )


def test_nothing_is_deleted_if_the_new_one_is_broken(tmp_path: Path) -> None:
    """As by a disk that loses what was written: the last good one stays."""

    class Losing(Disk):
        @override
        def flush_folder(self, path: Path) -> None:
            super().flush_folder(path)
            if path == tmp_path and (tmp_path / "step-00000002").exists():
                os.truncate(tmp_path / "step-00000002" / "shards" / "rank-00000.safetensors", 100)

    save(tmp_path, 1, Retention())
    saved = save_checkpoint(tmp_path, 2, pieces_of_rank(0, 2, world=1), {}, retention=Retention(keep=1), disk=Losing())
    assert steps(tmp_path) == [2, 1]
    assert saved.remarks[0].startswith(
        f"{tmp_path}/step-00000002/shards/rank-00000.safetensors: 100 bytes; manifest.json"
    )
    assert saved.remarks[1] == "no older checkpoint was deleted"


def test_keeping_none_is_refused() -> None:
    """At least one checkpoint stays."""
    with pytest.raises(ValueError, match="keep is 0; at least one checkpoint must stay"):
        Retention(keep=0)


def test_what_dead_writers_left_is_swept_and_what_living_ones_write_is_not(tmp_path: Path) -> None:
    """A lock tells them apart; folders of other names, and links, stay."""
    disk = Disk()
    dead, living = tmp_path / temporary_name(1), tmp_path / temporary_name(2)
    for folder in (dead, living, tmp_path / ".tmp-mine", tmp_path / ".trash-step-00000001-ab", tmp_path / "outside"):
        (folder / "shards").mkdir(parents=True)
    with disk.lock(living):
        sweep_abandoned(disk, tmp_path)
        assert sorted(os.listdir(tmp_path)) == sorted([".tmp-mine", living.name, "outside"])
    sweep_abandoned(disk, tmp_path)
    assert sorted(os.listdir(tmp_path)) == [".tmp-mine", "outside"]


def test_what_cannot_be_deleted_is_a_remark(tmp_path: Path) -> None:
    """The save itself goes on: trash of an earlier one may be held open elsewhere."""

    class Busy(Disk):
        @override
        def remove_tree(self, path: Path) -> None:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    save(tmp_path, 1, Retention())
    (tmp_path / ".trash-step-00000001-ab").mkdir()
    saved = save_checkpoint(tmp_path, 2, pieces_of_rank(0, 2, world=1), {}, retention=Retention(keep=1), disk=Busy())
    assert saved.remarks == (
        f"{tmp_path}/.trash-step-00000001-ab: left by an earlier save, and cannot be deleted (Device or resource busy)",
        f"{tmp_path}/step-00000001: cannot be deleted (Device or resource busy)",
    )
    assert steps(tmp_path) == [2]


def no_lock(path: Path) -> bool | None:
    return None


def test_without_locks_age_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a file system that has none, a temporary folder of yesterday is abandoned."""
    monkeypatch.setattr(retention_module, "lock_is_free", no_lock)
    old, new = tmp_path / temporary_name(1), tmp_path / temporary_name(2)
    old.mkdir()
    new.mkdir()
    yesterday = time.time() - ABANDONED_SECONDS - 60
    os.utime(old, (yesterday, yesterday))
    sweep_abandoned(Disk(), tmp_path)
    assert os.listdir(tmp_path) == [new.name]
