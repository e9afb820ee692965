"""The process from which a verification forks its worlds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from unipar.launcher.processes import starters
from unipar.task.reference import TaskRef
from unipar.verification.world_pool import open_world_pool


def test_libraries_see_no_gpu_for_runs_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed chooses its device when it is imported, which is before a fork learns of its own."""
    seen: list[dict[str, str]] = []

    def see(modules: Any, environment: dict[str, str]) -> Any:
        seen.append(environment)
        raise KeyboardInterrupt

    monkeypatch.setattr(starters, "ForkServer", see)
    ref = TaskRef()
    with pytest.raises(KeyboardInterrupt), open_world_pool(tmp_path, ref, ["native"], 1, "cpu"):
        pass
    assert seen == [{"CUDA_VISIBLE_DEVICES": ""}]


def test_nothing_is_forked_for_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA does not survive a fork: each worker is a new interpreter."""

    def refuse(*_: object) -> None:
        pytest.fail("a fork server for a device")

    monkeypatch.setattr(starters, "ForkServer", refuse)
    with open_world_pool(tmp_path, TaskRef(), ["native"], 1, "cuda:0"):
        pass
