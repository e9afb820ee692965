"""The device of a rank: memory that is freed late."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import chain, repeat

import pytest
import torch

from unipar.distributed import device

CUDA = torch.device("cuda:0")


def waited(monkeypatch: pytest.MonkeyPatch, allocated: Iterator[int]) -> float:
    """Return the seconds that waiting took for bytes that are read as `allocated`, by a clock that sleeping moves."""
    slept: list[float] = []
    synchronized: list[torch.device] = []

    def read(_: torch.device) -> int:
        return next(allocated)

    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(time, "monotonic", lambda: sum(slept))
    monkeypatch.setattr(device, "synchronize", synchronized.append)
    monkeypatch.setattr(device, "bytes_allocated", read)
    device.wait_for_late_frees(CUDA, still=0.3, most=3.0)
    assert synchronized == [CUDA]
    return sum(slept)


def test_memory_that_is_freed_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the last change the bytes must stay the same for a while."""
    assert waited(monkeypatch, repeat(5)) == pytest.approx(0.3, abs=0.021)
    assert waited(monkeypatch, chain(repeat(9, 6), repeat(5))) == pytest.approx(0.42, abs=0.021)


def test_memory_that_never_stays_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting has an end."""
    assert waited(monkeypatch, iter(range(1000))) == pytest.approx(3.0, abs=0.021)
