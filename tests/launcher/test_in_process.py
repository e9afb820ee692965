"""Waiting of foreign ranks for the run folder: a mark says that it is made; a killed run may leave one behind."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from unipar.distributed.place import Place
from unipar.errors import WorldMismatch
from unipar.launcher import in_process

PLACE = Place(rank=1, size=2, local_rank=1, local_size=2, launcher="mpirun", job="815")


def mine() -> list[str]:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    return [boot, os.readlink("/proc/self/ns/pid")]


def began() -> str:
    return Path("/proc/self/stat").read_text("ascii").rpartition(")")[2].split()[19]


def leave(run: Path, where: list[str], pid: int, when: str) -> None:
    in_process._started_mark_path(run, PLACE).write_text(json.dumps([where, pid, when]), "utf-8")  # pyright: ignore[reportPrivateUsage]


def wait(run: Path) -> None:
    in_process._wait_for_run_folder(run, PLACE, 0.05)  # pyright: ignore[reportPrivateUsage]


def test_a_rank_that_lives(tmp_path: Path) -> None:
    """Nobody waits any more."""
    leave(tmp_path, mine(), os.getpid(), began())
    wait(tmp_path)


def test_on_another_machine(tmp_path: Path) -> None:
    """Numbers of processes mean nothing there, so it is believed."""
    leave(tmp_path, ["another", "pid:[1]"], 1 << 30, "1")
    wait(tmp_path)


@pytest.mark.parametrize(("pid", "when"), [(1 << 30, "1"), (os.getpid(), "1")], ids=["gone", "another one by now"])
def test_left_by_a_run_that_was_killed(pid: int, when: str, tmp_path: Path) -> None:
    """A mark of a killed run is not taken for this run's, and the waiting ends with an error."""
    leave(tmp_path, mine(), pid, when)
    with pytest.raises(WorldMismatch, match=rf"^rank 1 waited 0.05 s for rank 0 to make {tmp_path}$"):
        wait(tmp_path)


def test_the_folder_is_one_of_several(tmp_path: Path) -> None:
    """Where the config gives no `out`, it is the one in which rank 0 of this world left its mark, and no other."""
    for name in ("x", "x-2", "x-3", "x-3b"):
        (tmp_path / name).mkdir()
    find = in_process._wait_for_run_folder  # pyright: ignore[reportPrivateUsage]
    leave(tmp_path / "x", mine(), 1 << 30, "1")  # of a world that was killed
    leave(tmp_path / "x-3b", mine(), os.getpid(), began())  # of another config
    with pytest.raises(WorldMismatch) as e:
        find(tmp_path / "x", PLACE, 0.05, numbered=tmp_path / "x")
    assert str(e.value) == (f"rank 1 waited 0.05 s for rank 0 to make a run folder ({tmp_path}/x, x-2, ...)")
    leave(tmp_path / "x-3", mine(), os.getpid(), began())
    assert find(tmp_path / "x", PLACE, 0.05, numbered=tmp_path / "x") == tmp_path / "x-3"
