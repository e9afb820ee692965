"""Result files in a folder: finding, reading and checking them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final, Literal

from unipar.errors import ReportError
from unipar.results.comparison import Comparison
from unipar.results.row import StrategyResult
from unipar.results.scaling import Scaling
from unipar.results.stored import not_written_by_unipar, parse_result
from unipar.results.verdicts import Verdicts

ResultKind = Literal["comparison", "scaling", "run", "verification", "observation"]

VERIFY_JSON: Final = "verify.json"
"""Name of the file of a verification."""


RESULT_FILES: Final[dict[str, ResultKind]] = {
    "compare/compare.json": "comparison",
    "compare.json": "comparison",
    "worlds/worlds.json": "scaling",
    "worlds.json": "scaling",
    "scale/scale.json": "scaling",
    "scale.json": "scaling",
    "observed.json": "observation",
    "rank-0.jsonl": "run",
    "verify/verify.json": "verification",
    "verify.json": "verification",
}
"""Kinds of results by the file that marks them; if a folder has several, the first is shown."""


def find_result_file(place: Path) -> tuple[ResultKind, Path]:
    """Return the kind and the path of the result file that `place` is or holds, directly or in a subfolder."""
    if place.is_file():
        if place.name not in RESULT_FILES:
            raise ReportError(f"{place} is not a result file of unipar; give the run folder")
        return RESULT_FILES[place.name], place
    for name, kind in RESULT_FILES.items():
        if (place / name).is_file():
            return kind, place / name
    if not place.exists():
        raise ReportError(f"{place} does not exist; give a run folder")
    raise ReportError(
        f"{place} holds no results: no comparison (compare.json), no scaling (worlds.json, scale.json), no "
        "verification (verify.json), no observed command (observed.json) and no run (rank-0.jsonl), neither directly "
        "nor in its folders compare, worlds, scale and verify; give a run folder"
    )


CONFIG_FILE: Final = "config.json"


ORIGINAL_CONFIG_FOLDER: Final = "asked"


def original_config_path(folder: Path, name: str) -> Path:
    """Return the path of a comparison's own config; the file keeps its name, so that another run has the same one."""
    return folder / ORIGINAL_CONFIG_FOLDER / f"{Path(name).name}.json"


def read_mapping(file: Path, what: str) -> dict[str, Any]:
    """Return the mapping in a JSON file; raise ReportError, which calls the file a `what`, if there is none."""
    try:
        data = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as e:
        why = getattr(e, "strerror", None) or f"it is truncated or not JSON ({e})"
        raise ReportError(f"{file} cannot be read: {why}") from None
    if not isinstance(data, dict):
        raise ReportError(f"{file} is not a {what}: it holds no mapping")
    worlds = data.get("worlds")
    if "cells" in data or (isinstance(worlds, list) and any("cell" in world for world in worlds)):
        raise ReportError(
            f"{file} was written before unipar 0.1.0, which calls cells strategies: read it with the version that "
            "wrote it, or run the command again with --overwrite"
        )
    return data


def parse_comparison(file: Path, data: dict[str, Any]) -> Comparison:
    """Return the comparison in a file's mapping; raise ReportError if unipar cannot have written it."""
    result = parse_result(Comparison, file, data, "a comparison")
    if not result.rows:
        raise not_written_by_unipar(file, "a comparison", "it has no strategies")
    one = result.reference
    for row in result.rows:
        why = _missing_results(row) if row.outcome == "ran" else ""
        if not why and one is not None and row.outcome == "ran" and len(row.losses) != len(one.losses):
            why = f"{row.strategy} has {len(row.losses)} losses, {one.strategy} has {len(one.losses)}"
        if why:
            raise not_written_by_unipar(file, "a comparison", why)
    return result


def parse_scaling(file: Path, data: dict[str, Any]) -> Scaling:
    """Return the scaling in a file's mapping; raise ReportError if unipar cannot have written it."""
    result = parse_result(Scaling, file, data, "a scaling")
    if not result.worlds:
        raise not_written_by_unipar(file, "a scaling", "it has no worlds")
    return result


def parse_verdicts(file: Path, data: dict[str, Any]) -> Verdicts:
    """Return the verdicts in a file's mapping; raise ReportError if unipar cannot have written it."""
    return parse_result(Verdicts, file, data, "a verification")


def _missing_results(row: StrategyResult) -> str:
    """Return which results are missing in a row that ran, or ""."""
    if not row.losses:
        return f"{row.strategy} ran and has no losses"
    return (
        ""
        if row.timed_seconds and min(row.timed_seconds) > 0
        else f"{row.strategy} ran and has steps that took no time"
    )
