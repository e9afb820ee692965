"""Settings that decide the last digits on a device: those that `verify` sets, and operations that have none."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

WORKSPACE_VARIABLE: Final = "CUBLAS_WORKSPACE_CONFIG"
WORKSPACE: Final = ":4096:8"
"""Workspace with which cuBLAS gives the same numbers each time; it reads the variable when a process first uses it."""

REPEATS: Final = 2
"""Repeats of the run of one process, where a repeat need not give the same bits."""


@dataclass(frozen=True)
class DeviceNumbers:
    """Settings of every run of a verification on a device."""

    device: str
    """Type of the device: cuda, npu ..."""

    unrepeatable: tuple[str, ...] = ()
    """Operations of the task that have no deterministic kernel there."""

    @property
    def repeats_bits(self) -> bool:
        """Whether a run that is repeated gives the same bits."""
        return not self.unrepeatable

    def variables(self, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
        """Return the environment variables of the ranks, without those that the user has set."""
        return {WORKSPACE_VARIABLE: WORKSPACE} if self.device == "cuda" and WORKSPACE_VARIABLE not in environ else {}

    def settings(self, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
        """Return each setting with its value, as verify.json and `explain` have them."""
        kernels = "on" if self.repeats_bits else f"on, without {', '.join(self.unrepeatable)}"
        common = {"fp32 products": "ieee, without TF32", "deterministic algorithms": kernels}
        if self.device != "cuda":
            return common
        return common | {
            WORKSPACE_VARIABLE: environ.get(WORKSPACE_VARIABLE, WORKSPACE),
            "cuDNN's search for kernels": "off",
            "attention": "flash for 16 bits, efficient for fp32; not cuDNN's, which split sequences cannot use",
        }

    def remark(self) -> str:
        """Return what follows from operations that have no deterministic kernel; "" if there are none."""
        if self.repeats_bits:
            return ""
        have = "has" if len(self.unrepeatable) == 1 else "have"
        return (
            f"{', '.join(self.unrepeatable)} {have} no deterministic kernel on {self.device}: a run that is repeated "
            "has other bits, so that none is called equal bit for bit; what is allowed includes the difference "
            f"between {REPEATS + 1} runs of one process that are the same"
        )


def numbers_on(device: str) -> DeviceNumbers | None:
    """Return the settings of a verification on a device ("cuda", "cuda:1"); None on the CPU, which needs none."""
    kind = device.partition(":")[0]
    return None if kind == "cpu" else DeviceNumbers(kind)
