"""What a run folder holds that a page can be made of: a comparison, worlds of several sizes, or one run."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

from unipar.errors import ReportError

Kind = Literal["comparison", "scaling", "run"]

FILES: Final[dict[str, Kind]] = {
    "compare/compare.json": "comparison",
    "compare.json": "comparison",
    "worlds/worlds.json": "scaling",
    "worlds.json": "scaling",
    "scale/scale.json": "scaling",
    "scale.json": "scaling",
    "rank-0.jsonl": "run",
}
"""By what tells that it is there; what comes first is shown, where there are several."""


def found(place: Path) -> tuple[Kind, Path]:
    """In a run folder, in one of its folders, or the file itself."""
    if place.is_file():
        if place.name not in FILES:
            raise ReportError(f"{place} is no file that unipar makes a page of; give the run folder")
        return FILES[place.name], place
    for name, kind in FILES.items():
        if (place / name).is_file():
            return kind, place / name
    if not place.exists():
        raise ReportError(f"{place} is not there; give a run folder")
    raise ReportError(
        f"{place} holds nothing to report: no comparison (compare.json), no scaling (worlds.json, scale.json) and no "
        "run (rank-0.jsonl), in it or in its folders compare, worlds and scale"
    )
