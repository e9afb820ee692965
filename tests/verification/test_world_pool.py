"""The process from which a verification forks its worlds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from unipar.launcher.processes import starters
from unipar.task.reference import TaskRef
from unipar.verification.world_pool import open_world_pool


@pytest.mark.parametrize(("device", "environment"), [("cpu", {"CUDA_VISIBLE_DEVICES": ""}), ("cuda:0", {})])
def test_libraries_see_a_gpu_only_for_a_run_on_it(
    device: str, environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSpeed chooses its device when it is imported, which is before a fork learns of its own."""
    seen: list[dict[str, str]] = []

    def see(modules: Any, environment: dict[str, str]) -> Any:
        seen.append(environment)
        raise KeyboardInterrupt

    monkeypatch.setattr(starters, "ForkServer", see)
    ref = TaskRef()
    with pytest.raises(KeyboardInterrupt), open_world_pool(tmp_path, ref, ["native"], 1, device):
        pass
    assert seen == [environment]
