"""compare.json and compare.csv: what a comparison leaves in its folder, and whether that still answers the question."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from unipar.backend.installed import machine, versions
from unipar.config import Cell, Config
from unipar.errors import ConfigError, OutExists, ReportError
from unipar.results.comparison import Comparison
from unipar.results.files import asked_of, comparison_of, inner, mapping
from unipar.results.scaling import Scaling
from unipar.results.spreadsheet import of_worlds, sheet
from unipar.task.reference import TaskRef
from unipar.utils.files import write_whole

NAME = "compare.json"
SHEET = "compare.csv"


_QUESTION = ("config", "cells", "task", "weights", "threads")
_PLACE = ("versions", "machine", "memory")


def identity(config: Config, cells: Sequence[str], ref: TaskRef, threads: str, unwatched: str) -> dict[str, Any]:
    """What must be the same for an earlier answer to hold; `unwatched`: what of the memory is not seen."""
    text = config.model_dump_json(exclude={"out"})
    return {
        "config": hashlib.sha256(text.encode()).hexdigest(),
        "cells": list(cells),
        "task": _task(ref),
        "weights": _stamp(config),
        "threads": threads,
        "versions": versions(Cell.parse(cell).backend for cell in cells),
        "machine": machine(),
        "memory": unwatched,
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


def reuse_or_clear(folder: Path, of: dict[str, Any], *, overwrite: bool) -> Comparison | None:
    """What is left of the same comparison: all of it, or the cells that ran whole, with nothing else in the folder.

    None and an empty folder where there is nothing to keep; an error where another one lies.
    """
    file = folder / NAME
    if not file.exists():
        if folder.exists() and any(folder.iterdir()):
            raise OutExists(f"{folder} is there and holds no {NAME}: move it away, or give another out")
        return None
    try:
        data = mapping(file, "comparison")
        old = inner(data, "of")
        cells = [Cell.parse(cell).slug for cell in old["cells"]]
        found = comparison_of(file, data)
    except (ReportError, ConfigError, LookupError, TypeError):
        if not overwrite:
            said = "is cut short or not what unipar wrote: give --overwrite to replace it, or another out"
            raise OutExists(f"{file} {said}") from None
        _remove(folder)
        return None
    whole = [] if overwrite else [row.cell for row in found.rows if row.outcome == "ran"]
    if not overwrite:
        differ = [key for key in _QUESTION if old.get(key) != of.get(key)]
        differ += [key for key in _PLACE if whole and not _holds(old.get(key), of[key])]
        if differ:
            raise OutExists(
                f"{folder} holds another comparison (other {', '.join(differ)}): "
                "give --overwrite to replace it, or another out"
            )
    for slug in {*cells} - {Cell.parse(cell).slug for cell in whole}:
        shutil.rmtree(folder / slug, ignore_errors=True)
    if whole:
        return found
    _remove(folder)
    return None


def _holds(before: Any, now: Any) -> bool:
    """A library that has come since changes nothing of what ran without it."""
    return before == now or (isinstance(before, dict) and before.items() <= now.items())


def _remove(folder: Path) -> None:
    """What `write` wrote; the file that says whose it is goes last."""
    (folder / SHEET).unlink(missing_ok=True)
    (folder / NAME).unlink()


def write(folder: Path, of: dict[str, Any], now: Comparison) -> None:
    """All figures; a row a cell beside them."""
    folder.mkdir(parents=True, exist_ok=True)
    data = {"of": of, "finished": now.finished, **now.to_json()}
    write_whole(folder / NAME, json.dumps(data, indent=2) + "\n")
    write_whole(folder / SHEET, sheet(now))


def write_worlds(folder: Path, figures: str, rows: str, now: Scaling) -> None:
    """All figures; a row a world beside them."""
    write_whole(folder / figures, json.dumps(now.to_json(), indent=2) + "\n")
    write_whole(folder / rows, of_worlds(now))


def ask(folder: Path, name: str, config: Config) -> None:
    """What was asked, under its name, so that it can be run again."""
    file = asked_of(folder, name)
    file.parent.mkdir(exist_ok=True)
    file.write_text(config.written(), encoding="utf-8")


def write_or_explain(folder: Path, write: Callable[[], None]) -> str:
    """Why what was found could not be written; empty: it was. It is shown all the same."""
    try:
        write()
    except OSError as e:
        return f"what was found could not be kept: {e.filename or folder} ({e.strerror or e})"
    return ""
