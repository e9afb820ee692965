"""`SettledConfig`: what decides it, what changes it, and how workers get it."""

from __future__ import annotations

import json
from pathlib import Path

from unipar.config import Config, Strategy
from unipar.config.settled import SettledConfig, read_settled

CONFIG = Config.model_validate({"batch": {"total": 8}, "train": {"steps": 3}})


def test_changes_come_with_it() -> None:
    """The number of ranks is settled, and other keys are changed at once; the device is decided apart."""
    settled = SettledConfig.of(CONFIG, Strategy("native"), 2, "cpu", {"out": "runs/x", "log.every": 5})
    assert (settled.config.parallel.data, settled.config.out, settled.config.log.every) == (2, "runs/x", 5)
    assert (settled.ranks, settled.sizes.local, settled.device) == (2, 4, "cpu")
    assert (settled.config.device, settled.on_device.device) == ("auto", "cpu")
    assert settled.on_device.on_device("cpu") == settled.on_device


def test_workers_read_what_was_written(tmp_path: Path) -> None:
    """config.json and launch.json hold it, beside what else a launch says there."""
    settled = SettledConfig.of(CONFIG, Strategy("native", "parameters"), 2, "cuda")
    config, launch = settled.texts({"boot": "b", "said": []})
    (tmp_path / "config.json").write_text(config, "utf-8")
    (tmp_path / "launch.json").write_text(launch, "utf-8")
    assert read_settled(tmp_path) == settled
    assert json.loads(launch) == {"boot": "b", "said": [], "settled": settled.to_json()}
