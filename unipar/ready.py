"""Whether a run could start: all that can be known before any process does, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from unipar import devices, registry
from unipar.backend import Backend
from unipar.config import Cell, Sizes
from unipar.errors import BackendNotFound, ConfigError, OutExists, Unsupported
from unipar.place import Place
from unipar.source import Source
from unipar.task import TaskRef
from unipar.track import require


@dataclass(frozen=True)
class Ready:
    """What a run will be."""

    backend: Backend
    cell: Cell
    ranks: devices.Ranks
    sizes: Sizes


def ready(source: Source, ref: TaskRef | None, place: Place | None = None) -> Ready:
    """What `source` comes to here, in the world of `place` or in one of our own; or the error that says why not."""
    config = source.config
    backend = registry.check(config)
    for tracker in config.log.to:
        require(tracker)
    if ref is not None:
        ref.look()
    ranks = devices.ranks(config, place)
    sizes = config.batch.settle(ranks.number)
    devices.check_enough(config, ranks.number, place.local_size if place else None)
    return Ready(backend, registry.cell_of(config), ranks, sizes)


def check_cells(source: Source) -> list[Cell]:
    """The cells that `compare` would run, each known by name."""
    try:
        return registry.expand(source.config.compare.cells)
    except (BackendNotFound, Unsupported, ConfigError) as e:
        place = source.origins.get("compare.cells")
        raise ConfigError(f"{source.label}: compare.cells{f' ({place})' if place else ''}: {e}") from None


def refuse_existing(out: Path) -> None:
    """A run's folder holds one run, and is never mixed with another's."""
    if out.exists() and not out.is_dir():
        raise OutExists(f"out: {out} is a file; name another folder with --out")
    if (out / "config.json").exists():
        raise OutExists(f"out: {out} holds a run already; --overwrite replaces it, --out names another folder")
