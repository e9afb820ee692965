"""The process that plans: whatever becomes of it, the comparison has its forecast or a sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from unipar.comparison import make_forecast as forecast
from unipar.comparison.make_forecast import device_memory, make_forecast
from unipar.config import Config, Strategy
from unipar.config.settled import SettledConfig
from unipar.launcher.processes.starters import SharedForkServer
from unipar.results.forecast.records import Forecast
from unipar.task.reference import TaskRef

pytestmark = pytest.mark.forked

TASK = """
import os
import time
import unipar

class Mine(unipar.Task):
    def __init__(self, how):
        time.sleep(60) if how == "hangs" else os._exit(7)
    def model(self): ...
    def data(self): ...
    def loss(self, model, batch): ...
"""


def settled(device: str = "cpu", **changed: Any) -> SettledConfig:
    config = Config.model_validate({"batch": {"total": 8}, "device": device, "train": {"steps": 10}} | changed)
    return SettledConfig.of(config, Strategy("native"), 2, device)


def made(tmp_path: Path, how: str, most_seconds: float) -> Forecast:
    (tmp_path / "task.py").write_text(TASK, encoding="utf-8")
    at = settled(task={"use": f"{tmp_path}/task.py:Mine", "args": {"how": how}})
    ref = TaskRef.of(None, at.config.task, {})
    return make_forecast(at, [at], ref, SharedForkServer([], use=False), "1", most_seconds)


def test_planning_that_takes_long_is_ended(tmp_path: Path) -> None:
    """After a number of seconds; the comparison has all that was measured."""
    found = made(tmp_path, "hangs", 0.2)
    assert found.problem == "planning took more than 200 ms and was ended; try `unipar plan`"
    assert (found.ranks, found.samples, found.share, found.strategies) == (2, 8, 4, ())


def test_a_process_that_dies_is_a_sentence(tmp_path: Path) -> None:
    """Its error is quoted, and none is raised."""
    problem = made(tmp_path, "dies", 60.0).problem
    assert problem.startswith("planning failed: rank 0 ")
    assert "7" in problem


def test_an_interrupt_ends_planning_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was measured is there by then."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(forecast, "_in_process", interrupt)
    assert made(tmp_path, "dies", 60.0).problem == "planning was interrupted"


def test_the_memory_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the config says, the GPU's (shared by the ranks on it), or this machine's; nothing if it is not known."""

    def gpu() -> int:
        return 80 * 2**30

    def none() -> int:
        raise OSError("there is no driver")

    monkeypatch.setattr(forecast, "memory_limit_bytes", lambda: 24 * 2**30)
    monkeypatch.setattr(forecast, "smallest_gpu_memory", gpu)
    assert device_memory(settled()) == (24 * 2**30, "machine")
    assert device_memory(settled(batch={"total": 8, "memory": "2GiB"})) == (2 * 2**30, "batch.memory")
    assert device_memory(settled("cuda")) == (80 * 2**30, "GPU")
    assert device_memory(settled("cuda:0")) == (40 * 2**30, "GPU")
    monkeypatch.setattr(forecast, "smallest_gpu_memory", none)
    assert device_memory(settled("cuda")) == (None, "")
