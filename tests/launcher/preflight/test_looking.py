"""`unipar doctor --across`: what two machines see of a folder and of each other's clock, as two threads."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
import torch.distributed as dist

from unipar.launcher.preflight.network import compare_clocks
from unipar.launcher.preflight.run_folder import FolderFacts, look_at_folder


def look(*outs: Path, wanted: str = "auto") -> list[FolderFacts]:
    """What each machine sees, whose run folder is there."""
    store, all_have_looked = dist.HashStore(), Barrier(len(outs))

    def one(index: int) -> FolderFacts:
        with look_at_folder(store, index, outs[index], wanted) as facts:
            all_have_looked.wait(30)
            return facts

    with ThreadPoolExecutor(len(outs)) as pool:
        return list(pool.map(one, range(len(outs))))


def test_one_folder(tmp_path: Path) -> None:
    """A folder is looked at where it would be made; the other machine sees the first one's lock; nothing is left."""
    first, second = look(tmp_path / "runs/x", tmp_path / "runs/x")
    assert (first.base, first.out) == (str(tmp_path), f"{tmp_path}/runs/x")
    assert (first.writable, first.shared, first.lock, first.why_no_lock) == (True, True, "", "")
    assert (second.writable, second.shared, second.lacks, second.lock) == (True, True, "", "holds")
    assert list(tmp_path.iterdir()) == []


def test_own_folders_are_not_looked_at(tmp_path: Path) -> None:
    """machines.folder: own needs no common one."""
    _, second = look(tmp_path / "x", tmp_path / "x", wanted="own")
    assert (second.shared, second.lock) == (False, "")


def test_locks_that_do_not_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a network file system that keeps locks to one machine, or has none."""
    monkeypatch.setattr("fcntl.flock", lambda *_: None)  # pyright: ignore[reportUnknownLambdaType]
    assert [facts.lock for facts in look(tmp_path, tmp_path)] == ["", "does not hold"]

    def none(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", none)
    first, second = look(tmp_path, tmp_path)
    assert (first.why_no_lock, second.lock) == ("No locks available", "")


def test_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds ahead of the first machine's clock, and how wrong that may be."""
    store, right, second = dist.HashStore(), time.time, threading.local()
    monkeypatch.setattr("time.time", lambda: right() + getattr(second, "ahead", 0.0))

    def compared(index: int) -> tuple[float, float]:
        second.ahead = 90.0 * index
        return compare_clocks(store, index, 2)

    with ThreadPoolExecutor(2) as pool:
        first, (ahead, uncertainty) = pool.map(compared, range(2))
    assert first == (0.0, 0.0)
    assert 0 < uncertainty < 1
    assert ahead == pytest.approx(90.0, abs=uncertainty + 0.001)
