"""compare.json and compare.csv: what a comparison leaves in its folder, and whether that still answers the question."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from unipar.backend.installed import installed_versions, machine_summary
from unipar.config import Cell, Config
from unipar.errors import ConfigError, OutExists, ReportError
from unipar.results.comparison import Comparison
from unipar.results.files import nested_mapping, original_config_path, parse_comparison, read_mapping
from unipar.results.scaling import Scaling
from unipar.results.spreadsheet import format_comparison_csv, format_scaling_csv
from unipar.task.reference import TaskRef
from unipar.utils.files import write_file_atomically

COMPARE_JSON = "compare.json"
COMPARE_CSV = "compare.csv"


_REQUEST_KEYS = ("config", "cells", "task", "weights", "threads")
_MACHINE_KEYS = ("versions", "machine", "memory")


def comparison_identity(
    config: Config, cells: Sequence[str], ref: TaskRef, threads: str, unwatched: str
) -> dict[str, Any]:
    """What must be the same for an earlier answer to hold; `unwatched`: what of the memory is not seen."""
    text = config.model_dump_json(exclude={"out"})
    return {
        "config": hashlib.sha256(text.encode()).hexdigest(),
        "cells": list(cells),
        "task": _hash_task(ref),
        "weights": _stamp_weights(config),
        "threads": threads,
        "versions": installed_versions(Cell.parse(cell).backend for cell in cells),
        "machine": machine_summary(),
        "memory": unwatched,
    }


def _hash_task(ref: TaskRef) -> str:
    """The task's own file and arguments; what it imports is not followed."""
    told = json.dumps(ref.to_json() | {"path": None}, sort_keys=True, default=str).encode()
    places = [ref.task, *ref.functions.values()]
    files = sorted({place.file for place in places if place is not None and place.file is not None})
    return hashlib.sha256(told + b"".join(Path(file).read_bytes() for file in files)).hexdigest()


def _stamp_weights(config: Config) -> list[int] | None:
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
    file = folder / COMPARE_JSON
    if not file.exists():
        if folder.exists() and any(folder.iterdir()):
            raise OutExists(f"{folder} is there and holds no {COMPARE_JSON}: move it away, or give another out")
        return None
    try:
        data = read_mapping(file, "comparison")
        old = nested_mapping(data, "of")
        cells = [Cell.parse(cell).slug for cell in old["cells"]]
        found = parse_comparison(file, data)
    except (ReportError, ConfigError, LookupError, TypeError):
        if not overwrite:
            said = "is cut short or not what unipar wrote: give --overwrite to replace it, or another out"
            raise OutExists(f"{file} {said}") from None
        _remove_result_files(folder)
        return None
    whole = [] if overwrite else [row.cell for row in found.rows if row.outcome == "ran"]
    if not overwrite:
        differ = [key for key in _REQUEST_KEYS if old.get(key) != of.get(key)]
        differ += [key for key in _MACHINE_KEYS if whole and not _still_holds(old.get(key), of[key])]
        if differ:
            raise OutExists(
                f"{folder} holds another comparison (other {', '.join(differ)}): "
                "give --overwrite to replace it, or another out"
            )
    for slug in {*cells} - {Cell.parse(cell).slug for cell in whole}:
        shutil.rmtree(folder / slug, ignore_errors=True)
    if whole:
        return found
    _remove_result_files(folder)
    return None


def _still_holds(before: Any, now: Any) -> bool:
    """A library that has come since changes nothing of what ran without it."""
    return before == now or (isinstance(before, dict) and before.items() <= now.items())


def _remove_result_files(folder: Path) -> None:
    """What `write` wrote; the file that says whose it is goes last."""
    (folder / COMPARE_CSV).unlink(missing_ok=True)
    (folder / COMPARE_JSON).unlink()


def write_comparison(folder: Path, of: dict[str, Any], now: Comparison) -> None:
    """All figures; a row a cell beside them."""
    folder.mkdir(parents=True, exist_ok=True)
    data = {"of": of, "finished": now.finished, **now.to_json()}
    write_file_atomically(folder / COMPARE_JSON, json.dumps(data, indent=2) + "\n")
    write_file_atomically(folder / COMPARE_CSV, format_comparison_csv(now))


def write_scaling(folder: Path, figures: str, rows: str, now: Scaling) -> None:
    """All figures; a row a world beside them."""
    write_file_atomically(folder / figures, json.dumps(now.to_json(), indent=2) + "\n")
    write_file_atomically(folder / rows, format_scaling_csv(now))


def write_original_config(folder: Path, name: str, config: Config) -> None:
    """What was asked, under its name, so that it can be run again."""
    file = original_config_path(folder, name)
    file.parent.mkdir(exist_ok=True)
    file.write_text(config.json_for_ranks(), encoding="utf-8")


def write_or_explain(folder: Path, write: Callable[[], None]) -> str:
    """Why what was found could not be written; empty: it was. It is shown all the same."""
    try:
        write()
    except OSError as e:
        return f"what was found could not be kept: {e.filename or folder} ({e.strerror or e})"
    return ""
