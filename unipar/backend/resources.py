"""How many ranks, on which device, and whether there are enough GPUs."""

from __future__ import annotations

import os
from dataclasses import dataclass

from unipar.backend import cells, registry
from unipar.config import Cell, Config
from unipar.distributed.gpus import VISIBLE_DEVICES_VARIABLE, count_visible_gpus, describe_gpu_count
from unipar.distributed.launchers import place_from_environment
from unipar.distributed.place import Place
from unipar.errors import Unsupported, WorldMismatch


@dataclass(frozen=True)
class RankCount:
    """A number of ranks, and why it is that."""

    number: int
    why: str = ""
    """Empty where the config says the number itself."""


def count_ranks(config: Config, place: Place | None = None) -> RankCount:
    """The ranks of a run: what the config says, or the world found, or the visible GPUs, or one."""
    backend = registry.find_backend(config.backend)
    cell = cells.cell_in(backend, config)
    return ranks_in(cell, config, place, alone=cells.is_alone(backend, cell))


def ranks_in(cell: Cell, config: Config, place: Place | None, *, alone: bool) -> RankCount:
    """Return the ranks of a run whose cell is known, and whether that is one process by itself."""
    said = config.parallel.data
    if alone:
        return RankCount(1, f"{cell} is one process")
    if place is not None:
        if said not in ("auto", place.size):
            raise WorldMismatch(
                f"parallel.data: {said}, but {place.launcher} started {place.size} "
                f"process{'es' * (place.size > 1)}; give it {said}, or say auto"
            )
        return RankCount(place.size, f"started by {place.launcher}")
    if said != "auto":
        return RankCount(said)
    if config.device == "cpu":
        return RankCount(1, "auto: no launcher, and device is cpu")
    if ":" in config.device:
        return RankCount(1, f"auto: no launcher, and device is {config.device} alone")
    gpus = count_visible_gpus()
    return RankCount(gpus or 1, f"auto: no launcher, {describe_gpu_count(gpus)} visible here")


def find_foreign_place() -> Place | None:
    """The world in which a foreign launcher started this process."""
    return place_from_environment(registry.list_launchers())


def choose_device(config: Config) -> tuple[str, str]:
    """`cpu`, `cuda` or `cuda:N`, and why where the config leaves it open."""
    if config.device != "auto":
        return config.device, ""
    gpus = count_visible_gpus()
    return ("cuda" if gpus else "cpu"), f"auto: {describe_gpu_count(gpus)} visible here"


def check_gpu_count(config: Config, number: int, local: int | None = None, asked: str = "parallel.data") -> None:
    """Refuse ranks that would find no GPU of their own; `local` of them are here, and `asked` said how many."""
    kind, _ = choose_device(config)
    if kind == "cpu":
        return
    gpus, wanted = count_visible_gpus(), local or number
    if ":" in kind:
        index = int(kind.partition(":")[2])
        if index >= gpus:
            raise _too_few_gpus(
                config, f"device: {kind} is not there; {describe_gpu_count(gpus)} visible here", "say device: cpu"
            )
    elif wanted > gpus:
        ways = "say device: cpu" if not gpus else "lower it, say device: cpu, or share one GPU by device: cuda:0"
        raise _too_few_gpus(config, f"{asked}: {wanted} ranks on cuda; {describe_gpu_count(gpus)} visible here", ways)


def _too_few_gpus(config: Config, what: str, way: str) -> Unsupported:
    choice = os.environ.get(VISIBLE_DEVICES_VARIABLE)
    limit = f" ({VISIBLE_DEVICES_VARIABLE}={choice})" if choice is not None else ""
    return Unsupported(str(cells.cell_of(config)), [f"{what}{limit}; {way}"])
