"""A comparison read for its page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any, Self

from unipar.backend import registry
from unipar.config import Cell, Config
from unipar.errors import ConfigError, ReportError, UniparError
from unipar.memory.account import MemoryAccount
from unipar.results.comparison import Comparison
from unipar.results.files import (
    CONFIG_FILE,
    find_result_file,
    nested_mapping,
    original_config_path,
    parse_comparison,
    read_mapping,
)
from unipar.results.row import CellResult
from unipar.run_folder.layout import ledger_path
from unipar.utils.mappings import flatten


@dataclass(frozen=True, kw_only=True)
class CellPageData:
    """One cell, with what lies in its folder."""

    row: CellResult
    memory: Sequence[MemoryAccount]
    """Of its ranks, as the comparison has it: what only lies in the cell's folder was not measured whole."""

    config: Mapping[str, Any]
    """Dotted keys, as its processes were given them; empty where they cannot be read."""

    says: str = ""
    """What its variant does otherwise, in its backend's words."""

    is_library_default: bool = False
    """Whether a size in it is its library's default and not ours."""

    parameters: int = 0

    @property
    def cell(self) -> str:
        return self.row.cell

    @property
    def timed(self) -> list[float]:
        return self.row.timed_seconds if self.row.outcome == "ran" else []

    @property
    def median_seconds(self) -> float:
        return median(self.timed)

    @cached_property
    def fullest_account(self) -> MemoryAccount | None:
        """Of the rank that held most."""
        return max(self.memory, key=lambda a: a.peak.peak, default=None)

    @property
    def peak(self) -> int:
        assert self.fullest_account is not None, self.cell
        return self.fullest_account.peak.peak


@dataclass(frozen=True, kw_only=True)
class ComparisonPageData:
    """A comparison as its page shows it."""

    folder: Path
    comparison: Comparison
    cells: tuple[CellPageData, ...]
    versions: Mapping[str, str]
    machine: Mapping[str, Any]
    config: Mapping[str, Any]
    """What was asked, with dotted keys; empty where it was not kept."""

    problems: tuple[str, ...] = ()
    """What could not be read."""

    @classmethod
    def read(cls, place: Path) -> Self:
        """From a run folder, its folder `compare` or the file in that."""
        kind, file = find_result_file(place)
        if kind != "comparison":
            raise ReportError(f"{place} holds a {kind}, and no comparison")
        data = read_mapping(file, "comparison")
        problems: list[str] = []
        compared, folder = parse_comparison(file, data), file.parent
        of = data.get("of")
        of = of if isinstance(of, dict) else {}
        asked = original_config_path(folder, compared.name)
        return cls(
            folder=folder,
            comparison=compared,
            cells=tuple(_read_cell_data(folder, row, problems) for row in compared.rows),
            versions={str(k): str(v) for k, v in nested_mapping(of, "versions").items()},
            machine=nested_mapping(of, "machine"),
            config=read_config_keys(asked, problems) if asked.exists() else {},
            problems=tuple(problems),
        )

    @cached_property
    def measured_cells(self) -> list[CellPageData]:
        """The cells whose memory is known, the smallest first; of those that failed it is not all."""
        known = (c for c in self.cells if c.fullest_account is not None and c.row.outcome not in ("failed", "unlike"))
        return sorted(known, key=lambda c: c.peak)

    @property
    def failed_cells(self) -> list[CellPageData]:
        """The cells that failed after something of their memory was written down."""
        return [c for c in self.cells if c.fullest_account is not None and c.row.outcome == "failed"]

    @cached_property
    def timed_cells(self) -> list[CellPageData]:
        """The cells whose steps were timed, the fastest first."""
        return sorted((c for c in self.cells if c.timed), key=lambda c: c.median_seconds)

    def cell(self, name: str) -> CellPageData | None:
        return next((c for c in self.cells if c.cell == name), None)

    @property
    def parameters(self) -> int:
        return max((c.parameters for c in self.cells), default=0)


def _read_cell_data(folder: Path, row: CellResult, problems: list[str]) -> CellPageData:
    try:
        cell = Cell.parse(row.cell)
    except ConfigError:
        return CellPageData(row=row, memory=row.memory, config={})
    at = folder / cell.slug
    begun = _read_parameter_count(
        at, problems if row.outcome in ("ran", "unlike") else []
    )  # others may not have come to a start
    seen = CellPageData(row=row, memory=row.memory, config={}, parameters=begun)
    if (at / CONFIG_FILE).exists():
        seen = replace(seen, config=read_config_keys(at / CONFIG_FILE, problems))
    try:
        variant = registry.find_backend(cell.backend).capabilities.variants.get(cell.variant or "")
    except UniparError:  # a backend that is not known where the page is made
        variant = None
    return seen if variant is None else replace(seen, says=variant.says, is_library_default=variant.library_defaults)


def read_config_keys(file: Path, problems: list[str]) -> dict[str, Any]:
    try:
        data = read_mapping(file, "config")
    except ReportError as e:
        problems.append(str(e))
        return {}
    if data.keys() & Config.model_fields.keys():
        return dict(flatten(data))
    problems.append(f"{file} is no config that unipar wrote: no key of it is one of a config; it is left out")
    return {}


def _read_parameter_count(at: Path, problems: list[str]) -> int:
    """As rank 0's first events say; 0 where they cannot be read, or it never began."""
    file = ledger_path(at, 0)
    if not file.exists():
        return 0
    try:
        with file.open(encoding="utf-8") as lines:
            for line in lines:
                row = json.loads(line)
                if row["event"] == "start":
                    return int(row["parameters"])
        why = "no start of a run is in it"
    except (OSError, ValueError, LookupError, TypeError) as e:
        why = getattr(e, "strerror", None) or f"{type(e).__name__}: {e}"
    problems.append(f"{file} cannot be read as a rank's ledger ({why}): it is left out")
    return 0
