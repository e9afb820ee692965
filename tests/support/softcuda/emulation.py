"""Processes with an emulated device: the environment to start them in."""

from __future__ import annotations

import os
from pathlib import Path

from tests.support.softcuda import build, profiles
from tests.support.softcuda.activation import FOLDER
from tests.support.softcuda.coverage.recorder import RECORDS
from tests.support.softcuda.findings import REPORTS

ROOT = Path(__file__).parents[3]
SITE = Path(__file__).with_name("site")
NPU_SITE = Path(__file__).parent / "npu" / "site"
"""The folder with what pip would have installed: a package whose entry point torch loads at import."""


def emulated_environment(
    profile: str = "a100", *, devices: int | None = None, memory: int | None = None, reports: Path | None = None
) -> dict[str, str]:
    """Return the variables with which a Python that starts has an emulated device; raise NotBuilt if it cannot be had.

    `memory` is each device's in bytes; findings of all processes go to the folder `reports`.
    """
    assert profile in profiles.PROFILES, f"no such profile: {profile}"
    kind = profiles.PROFILES[profile].kind
    sites = [str(SITE), *([str(NPU_SITE)] if kind == "npu" else [])]
    known = ("", str(SITE), str(NPU_SITE))
    inherited = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p not in known]
    variables = {
        profiles.SWITCH: profile,
        FOLDER: str(build.library_folder(kind)),
        "PYTHONPATH": os.pathsep.join([*sites, str(ROOT), *inherited]),
    }
    if records := os.environ.get(RECORDS):
        variables[RECORDS] = records
    if devices is not None:
        variables[profiles.DEVICES] = str(devices)
    if memory is not None:
        variables[profiles.MEMORY] = str(memory)
    if reports is not None:
        variables[REPORTS] = str(reports)
    return variables
