"""Ranks that agree on a step, here as threads: at which one they stop or save together."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from typing_extensions import override

from tests.support.running import Line, running
from unipar.checkpoint.protocol.verifying import find_checkpoints
from unipar.training import stopping
from unipar.training.stopping import StepAgreement


def fake_world(rank: int, size: int, store: Any) -> Any:
    """A world of threads; its ranks take their steps together, as behind a collective."""
    return SimpleNamespace(rank=rank, size=size, store=store, synchronize=lambda: None, key=str)


def agreed_steps(size: int, every: int, wishes: dict[int, int], steps: int = 60) -> list[list[int]]:
    """The steps that each rank finds agreed; `wishes`: from which step which rank wishes one, until it has one."""
    store, collective = dist.HashStore(), Barrier(size)

    def train(rank: int) -> list[int]:
        agreement, found = StepAgreement(fake_world(rank, size, store), "x", every), list[int]()
        for step in range(steps):
            mine = any(who == rank and begins <= step and not any(at > begins for at in found)
                       for begins, who in wishes.items())  # fmt: skip
            if agreement(step, f"rank {rank}" if mine else ""):
                found.append(step)
            time.sleep(random.random() / 1000)
            if (step + 1) % every == 0:
                collective.wait(20)
        return found

    with ThreadPoolExecutor(size) as pool:
        return [found.result() for found in [pool.submit(train, rank) for rank in range(size)]]


@pytest.mark.parametrize("large", [False, True], ids=["each reads all", "rank 0 reads all"])
@pytest.mark.parametrize(
    ("size", "every"), [(2, 1), (4, 5), *(pytest.param(4, n, marks=pytest.mark.sweep) for n in (1, 2, 3))]
)
def test_ranks_agree_at_one_step(size: int, every: int, *, large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wishes of one rank, and of another later: each time the same step on all, between two synchronized ones."""
    monkeypatch.setattr(stopping, "LOOK_SECONDS", 0.002)
    monkeypatch.setattr(stopping, "LOOKS_PER_SECOND", 10_000)
    if large:
        monkeypatch.setattr(stopping, "LARGE_WORLD", 1)
    first, *others = agreed_steps(size, every, {3: 0, 20: 1, 35: 0})
    assert others == [first] * (size - 1)
    assert len(first) == 3
    assert [step % every for step in first] == [0, 0, 0]
    assert first[0] > 3
    assert first[1] > 20
    assert first[2] > 35


def test_the_reason_is_known_to_all() -> None:
    """A rank learns of a wish with its reason, and looks for it no oftener than once a second."""
    store = dist.HashStore()
    one, other = (StepAgreement(fake_world(rank, 2, store), "x") for rank in (0, 1))
    assert not one(7, "a signal")
    assert not other(7, "")
    assert other.reason == ""
    other._looked -= 1  # pyright: ignore[reportPrivateUsage]
    assert not other(7, "")
    assert other.reason == "a signal"
    assert (one(8, "a signal"), other(8, "")) == (True, True)


def test_a_duration_is_kept_between_logged_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """checkpoint.every: 1s saves at the next step, whatever log.every is."""
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now, time=time.time)
    monkeypatch.setattr("unipar.training.saves.time", clock)

    class Waits(Line):
        @override
        def train(self, run: Any) -> None:
            for local_batch in run.batches():
                run.step(local_batch)
                clock.now += 1.1 * (run.done == 2)

    with running(Waits(), tmp_path, log={"every": 99}, checkpoint={"every": "1s"}, train={"steps": 5}) as run:
        run.task.train(run)
    assert [found.step for found in find_checkpoints(tmp_path / "checkpoints")] == [5, 2]
