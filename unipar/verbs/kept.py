"""compare.json and compare.csv: what a comparison leaves in its folder, and whether that still answers the question."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from unipar import registry
from unipar.config import Cell, Config
from unipar.errors import OutExists
from unipar.report.comparison import Comparison
from unipar.report.sheet import sheet
from unipar.task import TaskRef

NAME = "compare.json"
SHEET = "compare.csv"
_LIBRARIES = ("unipar", "torch", "numpy")


def identity(config: Config, cells: Sequence[str], ref: TaskRef) -> dict[str, Any]:
    """What must be the same for an earlier answer to hold."""
    text = config.model_dump_json(exclude={"out"})
    return {
        "config": hashlib.sha256(text.encode()).hexdigest(),
        "cells": list(cells),
        "task": _task(ref),
        "weights": _stamp(config),
        "versions": versions(cells),
        "machine": machine(),
    }


def _task(ref: TaskRef) -> str:
    """The task's own file and arguments; what it imports is not followed."""
    told = json.dumps(ref.to_json() | {"path": None}, sort_keys=True, default=str).encode()
    places = [ref.task, *ref.functions.values()]
    files = sorted({place.file for place in places if place is not None and place.file is not None})
    return hashlib.sha256(told + b"".join(Path(file).read_bytes() for file in files)).hexdigest()


def _stamp(config: Config) -> list[int] | None:
    """A file of weights may be large: its size and time tell it from another."""
    wanted = config.model.loading
    if wanted is None:
        return None
    seen = Path(wanted.file).stat()
    return [seen.st_size, seen.st_mtime_ns]


def versions(cells: Sequence[str]) -> dict[str, str]:
    backends = {Cell.parse(cell).backend for cell in cells}
    needed = {module for name in backends for module in registry.find(name).requires}
    made = {"python": platform.python_version()}
    for name in (*_LIBRARIES, *sorted(needed)):
        try:
            made[name] = version(name)
        except PackageNotFoundError:
            continue
    return made


def machine() -> dict[str, Any]:
    """Where it ran: figures from another machine say nothing of this one."""
    lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    model = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine()
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"system": platform.platform(), "cpu": model, "cores": len(os.sched_getaffinity(0)), "memory": memory}


def earlier(folder: Path, of: dict[str, Any], *, overwrite: bool) -> Comparison | None:
    """The finished comparison of the same thing, or None and an empty folder; an error where another one lies."""
    file = folder / NAME
    if not file.exists():
        if folder.exists() and any(folder.iterdir()):
            raise OutExists(f"{folder} is there and holds no {NAME}: move it away, or give another out")
        return None
    try:
        data: dict[str, Any] = json.loads(file.read_text("utf-8"))
        old: dict[str, Any] = data["of"]
        cells: list[str] = old["cells"]
    except (ValueError, LookupError, TypeError):
        if not overwrite:
            said = "is cut short or not what unipar wrote: give --overwrite to replace it, or another out"
            raise OutExists(f"{file} {said}") from None
        _remove(folder)
        return None
    if not overwrite:
        differ = [key for key in ("config", "cells", "task") if old[key] != of[key]]
        if not differ and data["finished"]:
            differ = [key for key in ("versions", "machine") if old.get(key) != of[key]]
            if not differ:
                return Comparison.from_json(data, note=f"from {file}; --overwrite runs it again")
        if differ:
            raise OutExists(
                f"{folder} holds another comparison (other {', '.join(differ)}): "
                "give --overwrite to replace it, or another out"
            )
    for cell in cells:
        shutil.rmtree(folder / Cell.parse(cell).slug, ignore_errors=True)
    _remove(folder)
    return None


def _remove(folder: Path) -> None:
    """What `write` wrote; the file that says whose it is goes last."""
    (folder / SHEET).unlink(missing_ok=True)
    (folder / NAME).unlink()


def write(folder: Path, of: dict[str, Any], now: Comparison) -> None:
    """All of it or none; a row a cell beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    data = {"of": of, "finished": now.finished, **now.to_json()}
    for name, text in ((NAME, json.dumps(data, indent=2) + "\n"), (SHEET, sheet(now))):
        partial = folder / f".{name}.{os.getpid()}"
        partial.write_text(text, encoding="utf-8")
        partial.rename(folder / name)
