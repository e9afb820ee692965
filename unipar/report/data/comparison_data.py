"""Data of a comparison's page, read from its folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any, Self

from unipar.backend import registry
from unipar.config import Config, Strategy
from unipar.errors import ConfigError, ReportError, UniparError
from unipar.memory.account import MemoryAccount
from unipar.results.comparison import Comparison
from unipar.results.result_files import (
    CONFIG_FILE,
    find_result_file,
    original_config_path,
    parse_comparison,
    read_mapping,
)
from unipar.results.row import StrategyResult
from unipar.run_folder.layout import run_log_path
from unipar.utils.mappings import flatten, nested_mapping


@dataclass(frozen=True, kw_only=True)
class StrategyPageData:
    """Data of one strategy: its row of results, and what its folder holds."""

    row: StrategyResult
    memory: Sequence[MemoryAccount]
    """Memory accounts by rank, as in compare.json; one in the strategy's folder alone is incomplete, and ignored."""

    config: Mapping[str, Any]
    """Config that the strategy's processes were given, by dotted key; empty if it cannot be read."""

    says: str = ""
    """Description of the strategy's variant, by its backend."""

    is_library_default: bool = False
    """Whether the variant uses a size that is its library's default instead of unipar's."""

    parameters: int = 0

    @property
    def strategy(self) -> str:
        """Name of the strategy."""
        return self.row.strategy

    @property
    def timed(self) -> list[float]:
        """Seconds of each timed step; [] if the strategy did not run to its end."""
        return self.row.timed_seconds if self.row.outcome == "ran" else []

    @property
    def median_seconds(self) -> float:
        """Median seconds of a timed step."""
        return median(self.timed)

    @cached_property
    def fullest_account(self) -> MemoryAccount | None:
        """Memory account of the rank with the highest peak; None if memory was not measured."""
        return max(self.memory, key=lambda a: a.peak.peak, default=None)

    @property
    def peak(self) -> int:
        """Peak bytes of the fullest rank."""
        assert self.fullest_account is not None, self.strategy
        return self.fullest_account.peak.peak


@dataclass(frozen=True, kw_only=True)
class ComparisonPageData:
    """Data of a comparison, as its page shows it."""

    folder: Path
    comparison: Comparison
    strategies: tuple[StrategyPageData, ...]
    versions: Mapping[str, str]
    machine: Mapping[str, Any]
    config: Mapping[str, Any]
    """Config that the comparison was given, by dotted key; empty if no copy was kept."""

    problems: tuple[str, ...] = ()
    """Sentences on files that could not be read."""

    @classmethod
    def read(cls, place: Path) -> Self:
        """Return the comparison in a run folder; `place` may also be its `compare` folder or the file compare.json."""
        kind, file = find_result_file(place)
        if kind != "comparison":
            raise ReportError(f"{place} holds a {kind}, not a comparison")
        data = read_mapping(file, "comparison")
        problems: list[str] = []
        compared, folder = parse_comparison(file, data), file.parent
        of = data.get("of")
        of = of if isinstance(of, dict) else {}
        asked = original_config_path(folder, compared.name)
        return cls(
            folder=folder,
            comparison=compared,
            strategies=tuple(_read_strategy_data(folder, row, problems) for row in compared.rows),
            versions={str(k): str(v) for k, v in nested_mapping(of, "versions").items()},
            machine=nested_mapping(of, "machine"),
            config=read_config_keys(asked, problems) if asked.exists() else {},
            problems=tuple(problems),
        )

    @cached_property
    def measured_strategies(self) -> list[StrategyPageData]:
        """Strategies whose memory is fully known, smallest first; strategies that failed are left out."""
        known = (
            c for c in self.strategies if c.fullest_account is not None and c.row.outcome not in ("failed", "unlike")
        )
        return sorted(known, key=lambda c: c.peak)

    @property
    def failed_strategies(self) -> list[StrategyPageData]:
        """Strategies that failed after at least one memory account was written."""
        return [c for c in self.strategies if c.fullest_account is not None and c.row.outcome == "failed"]

    @cached_property
    def timed_strategies(self) -> list[StrategyPageData]:
        """Strategies whose steps were timed, fastest first."""
        return sorted((c for c in self.strategies if c.timed), key=lambda c: c.median_seconds)

    def strategy(self, name: str) -> StrategyPageData | None:
        """Return the strategy of that name, or None."""
        return next((c for c in self.strategies if c.strategy == name), None)

    @property
    def parameters(self) -> int:
        """Number of parameters; 0 if no strategy recorded it."""
        return max((c.parameters for c in self.strategies), default=0)


def _read_strategy_data(folder: Path, row: StrategyResult, problems: list[str]) -> StrategyPageData:
    try:
        strategy = Strategy.parse(row.strategy)
    except ConfigError:
        return StrategyPageData(row=row, memory=row.memory, config={})
    at = folder / strategy.slug
    # a strategy with another outcome may have no start event, which is then not a problem
    parameters = _read_parameter_count(at, problems if row.outcome in ("ran", "unlike") else [])
    strategy_data = StrategyPageData(row=row, memory=row.memory, config={}, parameters=parameters)
    if (at / CONFIG_FILE).exists():
        strategy_data = replace(strategy_data, config=read_config_keys(at / CONFIG_FILE, problems))
    try:
        variant = registry.find_backend(strategy.backend).capabilities.variants.get(strategy.variant or "")
    except UniparError:  # the backend may not be installed where the page is made
        variant = None
    if variant is None:
        return strategy_data
    return replace(strategy_data, says=variant.says, is_library_default=variant.library_defaults)


def read_config_keys(file: Path, problems: list[str]) -> dict[str, Any]:
    """Return a config file by dotted key; if that is impossible return {} and append the reason to `problems`."""
    try:
        data = read_mapping(file, "config")
    except ReportError as e:
        problems.append(str(e))
        return {}
    if data.keys() & Config.model_fields.keys():
        return dict(flatten(data))
    problems.append(f"{file} is not a config written by unipar: none of its keys is a key of a config; it is left out")
    return {}


def _read_parameter_count(at: Path, problems: list[str]) -> int:
    """Return the number of parameters from rank 0's start event; 0 if there is none, or if it cannot be read."""
    file = run_log_path(at, 0)
    if not file.exists():
        return 0
    try:
        with file.open(encoding="utf-8") as lines:
            for line in lines:
                row = json.loads(line)
                if row["event"] == "start":
                    return int(row["parameters"])
        why = "it has no start event"
    except (OSError, ValueError, LookupError, TypeError) as e:
        why = getattr(e, "strerror", None) or f"{type(e).__name__}: {e}"
    problems.append(f"{file} cannot be read as a rank's run log ({why}): it is left out")
    return 0
