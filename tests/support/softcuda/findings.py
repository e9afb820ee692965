"""Findings of the emulated device, written down by each process: races, hangs, waits of the host, unpinned copies."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPORTS = "SOFTCUDA_REPORTS"
"""Environment variable with the folder of these files."""

HERE = str(Path(__file__).parent)

LOUD = ("race", "hang")
"""Kinds that are printed, too: a program that has one is wrong."""


@dataclass(frozen=True)
class DeviceFinding:
    """What one process did, and the innermost lines of Python that did it."""

    kind: str
    text: str
    where: tuple[str, ...]
    pid: int
    step: int = 0
    """Step of a training that tells it (stepwise.py); 0 before the first, after the last, and elsewhere."""


_step: int = 0


def begin_step(number: int) -> None:
    """Have findings from now on belong to this step."""
    global _step
    _step = number


def listen(native: Any) -> None:
    """Write down what this process does, and print what is wrong."""
    native.listen(_write)


def read_findings(folder: Path, *kinds: str) -> list[DeviceFinding]:
    """Return what processes have written down there, of some kinds or all."""
    lines = [line for file in sorted(folder.glob("*.jsonl")) for line in file.read_text("utf-8").splitlines()]
    read: list[dict[str, Any]] = [json.loads(line) for line in lines]
    found = [DeviceFinding(d["kind"], d["text"], tuple(d["where"]), d["pid"], d["step"]) for d in read]
    return [finding for finding in found if not kinds or finding.kind in kinds]


def _write(kind: str, text: str) -> None:
    where = _stack() if kind in LOUD or REPORTS in os.environ else ()
    if kind in LOUD:
        print(f"softcuda: {kind}: {text} ({' < '.join(where)})", file=sys.stderr, flush=True)
    if folder := os.environ.get(REPORTS):
        line = json.dumps({"kind": kind, "text": text, "where": where, "pid": os.getpid(), "step": _step})
        with open(Path(folder) / f"{os.getpid()}.jsonl", "a", encoding="utf-8") as file:
            file.write(line + "\n")


def _stack() -> list[str]:
    """Return the innermost lines that are neither torch's nor ours."""
    frame: Any = sys._getframe()  # pyright: ignore[reportPrivateUsage] - a thread of autograd's has no other
    lines: list[str] = []
    while frame is not None and len(lines) < 4:
        file = str(frame.f_code.co_filename)
        if "/torch/" not in file and not file.startswith((HERE, "<frozen")):
            lines.append(f"{'/'.join(file.split('/')[-3:])}:{frame.f_lineno}")
        frame = frame.f_back
    return lines
