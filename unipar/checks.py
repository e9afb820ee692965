"""Reading a config with every name in it looked up: its backend, the options of all backends, its trackers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from unipar import devices, registry, track
from unipar.backend import Backend
from unipar.complaint import options_complaint
from unipar.config import Cell, Config
from unipar.errors import BackendNotFound, ConfigError
from unipar.settled import SettledConfig
from unipar.source import Given, Source, given, read


@dataclass(frozen=True, kw_only=True)
class CheckedSource(Source):
    """A config as it was given, whose every name is known; its backend and cell are looked up here and never again."""

    backend: Backend
    """Its library may be missing."""

    cell: Cell

    @property
    def alone(self) -> bool:
        """Whether it is one process, whatever the config says about ranks."""
        return registry.is_alone(self.backend, self.cell)


def read_source(file: Path, sets: Sequence[str] = (), overrides: Mapping[str, Any] | None = None) -> CheckedSource:
    """Return the config in a file, with each `--set key=value` and the overrides of a script, its names checked."""
    return check_names(read(file, sets, overrides))


def given_source(config: Given, overrides: Mapping[str, Any] | None = None) -> CheckedSource:
    """Return what a script gave as a config, with its overrides, its names checked."""
    source = given(config, overrides)
    return source if isinstance(source, CheckedSource) else check_names(source)


def check_names(source: Source) -> CheckedSource:
    """Return the source with its backend; raise where a backend, an option or a tracker has an unknown name.

    Options of backends that are not used are checked too: otherwise a typo waits for the day they are used.
    """
    config = source.config
    if "/" in config.backend:
        cell = Cell.parse(config.backend)
        raise ConfigError(
            f"{source.label}: backend{source.place('backend')}: {config.backend!r} is a cell; "
            f"write backend: {cell.backend} and parallel: {{shard: {cell.shard}}}"
        )
    backend = _find(source, "backend", config.backend)
    for i, name in enumerate(config.log.to):
        try:
            track.find(name)
        except ConfigError as e:
            place = source.place(f"log.to.{i}") or source.place("log.to")
            raise ConfigError(f"{source.label}: log.to{place}: {e}") from None
    for name, options in config.options.items():
        owner = backend if name == config.backend else _find(source, f"options.{name}", name)
        try:
            owner.options.model_validate(options)
        except ValidationError as e:
            sentence = options_complaint(e, owner.options, name, source.places)
            raise ConfigError(f"{source.label}: {sentence}") from None
    return _checked(source, backend)


def in_cell(source: Source, cell: Cell, origin: str = "--backend") -> CheckedSource:
    """Return the same run in another cell, which `origin` asked for."""
    origins = {**source.origins, "backend": origin, "parallel.shard": origin}
    moved = replace(source, config=registry.at(source.config, cell), origins=origins)
    return _checked(moved, registry.find(cell.backend))


def settle(config: Config, ranks: int) -> SettledConfig:
    """Check and settle a config that was made in code; raise with every reason why it cannot run."""
    backend = registry.find(config.backend)
    cell = registry.cell_in(backend, config)
    return _settled(config, backend, cell, ranks, devices.device(config)[0])


def settled_in(settled: SettledConfig, cell: Cell) -> SettledConfig:
    """Return a settled config in another cell; raise with every reason why it cannot run there."""
    backend = registry.find(cell.backend)
    config = registry.at(settled.config, cell)
    return _settled(config, backend, cell, settled.ranks, settled.device)


def _settled(config: Config, backend: Backend, cell: Cell, ranks: int, device: str) -> SettledConfig:
    registry.check_cell(config, backend, cell)
    ranks = 1 if registry.is_alone(backend, cell) else ranks
    config.parallel.settle(ranks)
    return SettledConfig.of(config, cell, ranks, device)


def _checked(source: Source, backend: Backend) -> CheckedSource:
    cell = registry.cell_in(backend, source.config)
    return CheckedSource(
        source.config, source.name, source.folder, source.origins, source.label, backend=backend, cell=cell
    )


def _find(source: Source, key: str, name: str) -> Backend:
    try:
        return registry.find(name)
    except BackendNotFound as e:
        raise BackendNotFound(f"{source.label}: {key}{source.place(key)}: {e}") from None
