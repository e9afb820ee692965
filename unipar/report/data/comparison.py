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
from unipar.memory.account import Account
from unipar.results.comparison import Comparison
from unipar.results.files import CONFIG, asked_of, comparison_of, found, inner, mapping
from unipar.results.row import Row
from unipar.run_folder.layout import ledger_of
from unipar.utils.mappings import flatten


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One cell, with what lies in its folder."""

    row: Row
    memory: Sequence[Account]
    """Of its ranks, as the comparison has it: what only lies in the cell's folder was not measured whole."""

    config: Mapping[str, Any]
    """Dotted keys, as its processes were given them; empty where they cannot be read."""

    says: str = ""
    """What its variant does otherwise, in its backend's words."""

    own: bool = False
    """Whether a size in it is its library's default and not ours."""

    parameters: int = 0

    @property
    def cell(self) -> str:
        return self.row.cell

    @property
    def timed(self) -> list[float]:
        return self.row.timed if self.row.outcome == "ran" else []

    @property
    def middle(self) -> float:
        return median(self.timed)

    @cached_property
    def fullest(self) -> Account | None:
        """Of the rank that held most."""
        return max(self.memory, key=lambda a: a.peak.peak, default=None)

    @property
    def peak(self) -> int:
        assert self.fullest is not None, self.cell
        return self.fullest.peak.peak


@dataclass(frozen=True, kw_only=True)
class Told:
    """A comparison as its page shows it."""

    folder: Path
    found: Comparison
    cells: tuple[Seen, ...]
    versions: Mapping[str, str]
    machine: Mapping[str, Any]
    config: Mapping[str, Any]
    """What was asked, with dotted keys; empty where it was not kept."""

    problems: tuple[str, ...] = ()
    """What could not be read."""

    @classmethod
    def read(cls, place: Path) -> Self:
        """From a run folder, its folder `compare` or the file in that."""
        kind, file = found(place)
        if kind != "comparison":
            raise ReportError(f"{place} holds a {kind}, and no comparison")
        data = mapping(file, "comparison")
        problems: list[str] = []
        compared, folder = comparison_of(file, data), file.parent
        of = data.get("of")
        of = of if isinstance(of, dict) else {}
        asked = asked_of(folder, compared.name)
        return cls(
            folder=folder,
            found=compared,
            cells=tuple(_seen(folder, row, problems) for row in compared.rows),
            versions={str(k): str(v) for k, v in inner(of, "versions").items()},
            machine=inner(of, "machine"),
            config=config_of(asked, problems) if asked.exists() else {},
            problems=tuple(problems),
        )

    @cached_property
    def measured(self) -> list[Seen]:
        """The cells whose memory is known, the smallest first; of those that failed it is not all."""
        known = (c for c in self.cells if c.fullest is not None and c.row.outcome not in ("failed", "unlike"))
        return sorted(known, key=lambda c: c.peak)

    @property
    def broken(self) -> list[Seen]:
        """The cells that failed after something of their memory was written down."""
        return [c for c in self.cells if c.fullest is not None and c.row.outcome == "failed"]

    @cached_property
    def timed(self) -> list[Seen]:
        """The cells whose steps were timed, the fastest first."""
        return sorted((c for c in self.cells if c.timed), key=lambda c: c.middle)

    def cell(self, name: str) -> Seen | None:
        return next((c for c in self.cells if c.cell == name), None)

    @property
    def parameters(self) -> int:
        return max((c.parameters for c in self.cells), default=0)


def _seen(folder: Path, row: Row, problems: list[str]) -> Seen:
    try:
        cell = Cell.parse(row.cell)
    except ConfigError:
        return Seen(row=row, memory=row.memory, config={})
    at = folder / cell.slug
    begun = _parameters(at, problems if row.outcome in ("ran", "unlike") else [])  # others may not have come to a start
    seen = Seen(row=row, memory=row.memory, config={}, parameters=begun)
    if (at / CONFIG).exists():
        seen = replace(seen, config=config_of(at / CONFIG, problems))
    try:
        variant = registry.find(cell.backend).capabilities.variants.get(cell.variant or "")
    except UniparError:  # a backend that is not known where the page is made
        variant = None
    return seen if variant is None else replace(seen, says=variant.says, own=variant.library_defaults)


def config_of(file: Path, problems: list[str]) -> dict[str, Any]:
    try:
        data = mapping(file, "config")
    except ReportError as e:
        problems.append(str(e))
        return {}
    if data.keys() & Config.model_fields.keys():
        return dict(flatten(data))
    problems.append(f"{file} is no config that unipar wrote: no key of it is one of a config; it is left out")
    return {}


def _parameters(at: Path, problems: list[str]) -> int:
    """As rank 0's first events say; 0 where they cannot be read, or it never began."""
    file = ledger_of(at, 0)
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
