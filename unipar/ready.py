"""Whether a run could start: all that can be known before any process does, without torch."""

from __future__ import annotations

from dataclasses import dataclass

from unipar import devices, registry
from unipar.backend import Backend
from unipar.config import Cell, Sizes
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
