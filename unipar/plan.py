"""A run that may start: all that can be known to fit is looked at here, before any process."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from unipar import devices, folder, registry, weights
from unipar.backend import Backend
from unipar.config import Config
from unipar.errors import Unsupported, WorldMismatch
from unipar.installed import machine, versions
from unipar.place import Launcher, Place, probe, started_by
from unipar.source import Source
from unipar.task import Functions, Task, TaskRef
from unipar.track import require


@dataclass(frozen=True)
class Plan:
    """What is trained, by whom, on how many ranks, and where it is written down."""

    config: Config
    """With the number of ranks settled."""

    backend: Backend
    out: Path
    overwrite: bool
    place: Place | None
    """Of this process in the world that a foreign launcher made; None: ours is to be made."""

    ref: TaskRef | None
    """None for a loop in the user's own script, which workers run again."""

    @classmethod
    def of(cls, source: Source, ref: TaskRef | None, *, overwrite: bool) -> Self:
        config = source.config
        kind, _ = devices.device(config)
        backend = registry.check(config.model_copy(update={"device": "cpu"}) if kind == "cpu" else config)
        for tracker in config.log.to:
            require(tracker)
        look_at_weights(source)
        if ref is not None:
            ref.look()
        place = _place(source)
        ranks = devices.ranks(config, place)
        if place is not None and place.size != ranks.number:
            raise WorldMismatch(
                f"{place.launcher} started {place.size} processes, and {ranks.why}; start it with python"
            )
        config.batch.settle(ranks.number)
        config.parallel.settle(ranks.number)
        devices.check_enough(config, ranks.number, place.local_size if place else None)
        if place is None or place.rank == 0:
            folder.look(source.out, overwrite=overwrite)
        parallel = config.parallel.model_copy(update={"data": ranks.number})
        config = config.model_copy(update={"parallel": parallel, "out": str(source.out)})
        return cls(config, backend, source.out, overwrite, place, ref)

    @property
    def size(self) -> int:
        assert isinstance(self.config.parallel.data, int)
        return self.config.parallel.data

    def made(self, script: Sequence[str] = ()) -> Any:
        """The run folder, this run's alone while the context is open."""
        launch: dict[str, Any] = {"script": list(script)} if self.ref is None else {"task": self.ref.to_json()}
        ran = {"versions": versions([self.config.backend]), "machine": machine()}
        texts = self.config.written(), json.dumps(launch | ran, indent=2)
        return folder.made(self.out, *texts, overwrite=self.overwrite)


def look_at_weights(source: Source) -> None:
    """The file that the model begins from, if there is one."""
    if (wanted := source.config.model.loading) is not None:
        weights.look(wanted, (source.folder, Path.cwd()))


def _place(source: Source) -> Place | None:
    """Who a foreign launcher says this process is, if it can start this backend."""
    found = registry.launchers()
    place, launcher = probe(found, folder=source.out.resolve()), started_by(found)
    if place is not None and launcher is not None:
        check_serves(launcher, source.config)
    return place


def check_serves(launcher: Launcher, config: Config) -> None:
    """Refuse a launcher that was made for other backends."""
    if launcher.serves is None or config.backend in launcher.serves:
        return
    raise Unsupported(
        str(registry.cell_of(config)),
        [
            f"{launcher.name} starts {', '.join(launcher.serves)} only; start the same script with "
            "`torchrun --nproc-per-node N`, or with `python`, and unipar starts its ranks itself"
        ],
    )


def task_here(
    task: type[Task] | None, functions: Mapping[str, Callable[..., Any]], config: Config, ref: TaskRef | None
) -> Task:
    """The task as an object of this very process, which has its class already."""
    if functions:
        return Functions(functions)
    if task is not None:
        return task(**(config.task.args if config.task else {}))
    assert ref is not None
    return ref.load()
