"""Commands of users on the emulated device: a config for two ranks, and the losses that it leaves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.softcuda.emulation import ROOT
from tests.support.softcuda.trainings.strategies import SETTINGS, SIZES
from unipar.results.run_report import Report

COMMAND_SETTINGS: dict[str, Any] = {
    **SETTINGS,
    "task": {"use": f"{ROOT}/examples/char_gpt.py:CharGPT", "args": SIZES},
    "train": {**SETTINGS["train"], "steps": 6},
    "log": {"every": 1},
}
"""Six steps of a task without a loop of its own, each logged."""


def write_config(folder: Path, **changes: Any) -> str:
    """Return the path of a config for two ranks, whose run is in `folder`/run; sections are replaced as they are."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "x.yaml"
    made = {**COMMAND_SETTINGS, "parallel": {"data": 2}, "out": str(folder / "run"), **changes}
    file.write_text(json.dumps(made), "utf-8")
    return str(file)


def losses_of_run(folder: Path) -> list[float]:
    """Return the losses of the run in `folder`/run."""
    return [loss for _, loss in Report.read(folder / "run").losses]
