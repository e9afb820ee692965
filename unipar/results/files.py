"""Which result files a folder holds, read and checked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import TypeAdapter, ValidationError

from unipar.errors import ReportError
from unipar.results.comparison import Comparison
from unipar.results.row import CellResult

ResultKind = Literal["comparison", "scaling", "run"]


RESULT_FILES: Final[dict[str, ResultKind]] = {
    "compare/compare.json": "comparison",
    "compare.json": "comparison",
    "worlds/worlds.json": "scaling",
    "worlds.json": "scaling",
    "scale/scale.json": "scaling",
    "scale.json": "scaling",
    "rank-0.jsonl": "run",
}
"""By what tells that it is there; what comes first is shown, where there are several."""


def find_result_file(place: Path) -> tuple[ResultKind, Path]:
    """In a run folder, in one of its folders, or the file itself."""
    if place.is_file():
        if place.name not in RESULT_FILES:
            raise ReportError(f"{place} is no file that unipar makes a page of; give the run folder")
        return RESULT_FILES[place.name], place
    for name, kind in RESULT_FILES.items():
        if (place / name).is_file():
            return kind, place / name
    if not place.exists():
        raise ReportError(f"{place} is not there; give a run folder")
    raise ReportError(
        f"{place} holds nothing to report: no comparison (compare.json), no scaling (worlds.json, scale.json) and no "
        "run (rank-0.jsonl), in it or in its folders compare, worlds and scale"
    )


CONFIG_FILE: Final = "config.json"


ORIGINAL_CONFIG_FOLDER: Final = "asked"


def original_config_path(folder: Path, name: str) -> Path:
    """Where a comparison's own config lies: named as it was, so that one who runs it again gets the same name."""
    return folder / ORIGINAL_CONFIG_FOLDER / f"{Path(name).name}.json"


def read_mapping(file: Path, what: str) -> dict[str, Any]:
    """What a file holds; an error where that is no mapping."""
    try:
        data = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as e:
        why = getattr(e, "strerror", None) or f"it is cut short or is no JSON ({e})"
        raise ReportError(f"{file} cannot be read: {why}") from None
    if not isinstance(data, dict):
        raise ReportError(f"{file} is no {what}: it holds no mapping")
    return data


def parse_comparison(file: Path, data: dict[str, Any]) -> Comparison:
    """What a file's mapping tells; an error where unipar has not written it."""
    try:
        raw = Comparison.from_json(data)
        found = TypeAdapter(Comparison).validate_python(vars(raw) | {"rows": [vars(row) for row in raw.rows]})
    except (LookupError, TypeError, ValidationError) as e:
        said = f"no key {e}" if isinstance(e, LookupError) else str(e).partition("\n")[0]
        raise ReportError(f"{file} is no comparison that unipar wrote: {said}") from None
    if not found.rows:
        raise ReportError(f"{file} is no comparison that unipar wrote: it has no cells")
    one = found.reference
    for row in found.rows:
        said = _missing_results(row) if row.outcome == "ran" else ""
        if not said and one is not None and row.outcome == "ran" and len(row.losses) != len(one.losses):
            said = f"{row.cell} has {len(row.losses)} losses, {one.cell} has {len(one.losses)}"
        if said:
            raise ReportError(f"{file} is no comparison that unipar wrote: {said}")
    return found


def _missing_results(row: CellResult) -> str:
    """What a row that ran must have, and has not."""
    if not row.losses:
        return f"{row.cell} ran and has no losses"
    return "" if row.timed_seconds and min(row.timed_seconds) > 0 else f"{row.cell} ran and has steps that took no time"


def nested_mapping(of: Mapping[str, Any], key: str) -> dict[str, Any]:
    said = of.get(key)
    return said if isinstance(said, dict) else {}
