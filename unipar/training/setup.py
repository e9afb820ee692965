"""From a config to a run, on one rank: meet the others, make the model, let the backend split it."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from unipar.backend import Backend, Engine, Part
from unipar.config import Config
from unipar.config.settled import SettledConfig
from unipar.distributed.place import Place
from unipar.distributed.world import World, abandon
from unipar.errors import BackendNotInstalled, Stopped, TaskError
from unipar.model.blocks import find_blocks
from unipar.model.create import create_parts, whole_of
from unipar.model.optimizer import optimizer_factory, parameter_groups
from unipar.model.pretrained import load
from unipar.model.transforms import reworked
from unipar.run_folder.heartbeat import Heart
from unipar.run_folder.layout import beat_of, ledger_of
from unipar.run_folder.ledger import Ledger
from unipar.task import Task
from unipar.tracking.writer import Trackers
from unipar.training.out_of_memory import explaining
from unipar.training.parts import Trained
from unipar.training.run import TrainingRun
from unipar.training.stopping import listening
from unipar.utils.procfs import anonymous_memory, peak_rss

if TYPE_CHECKING:
    from torch import nn

    from unipar.memory.recording.step_log import Logged


@contextmanager
def opened(
    settled: SettledConfig,
    backend: Backend,
    task: Task,
    place: Place,
    run: Path,
    *,
    met: Callable[[World, Heart], None] | None = None,
) -> Generator[TrainingRun]:
    """A run that is ready to train; its world is left in order when the body ends well.

    `backend` is that of the settled cell. `met` is called when the ranks have met and nothing is built.
    """
    config = settled.config
    heart = Heart(beat_of(run, place.rank))
    with listening(), Ledger(ledger_of(run, place.rank)) as ledger, ExitStack() as failed:
        if place.size == 1 or not place.ours:  # a process that goes on after an error; a worker of ours ends at once
            failed.callback(abandon)
        with _library(backend):
            world = backend.join(config, place)
        if met is not None:
            met(world, heart)
        watcher = _watcher(config, backend, world, run, heart, ledger)
        trackers = Trackers(config.log.to, run, place.rank, config.model_dump(mode="json"), ledger.note)
        with explaining(run, place.rank):
            made = assembled(settled, backend, task, world, ledger=ledger, heart=heart, trackers=trackers)
        if watcher is not None:
            _watched(made, watcher)
        gc.collect()  # what building left in cycles: rank 0's whole model, where it was split
        try:
            yield made
        except Stopped:
            ledger.note("stopped", step=made.done)
            trackers.close()
            raise
        made.finish()
        ledger.note("end", steps=made.done, peak_rss=peak_rss())
        world.barrier()  # every rank's ledger is whole before any rank reads it
        for part in made.parts.values():
            part.engine.close()
        world.close()
        failed.pop_all()


def _watcher(config: Config, backend: Backend, world: World, run: Path, heart: Heart, ledger: Ledger) -> Logged | None:
    """`log.memory`; without it nothing of that is loaded."""
    if not config.log.memory:
        return None
    from unipar.memory.recording.step_log import logged

    watcher = logged(backend, world, run)
    ledger.note("memory", said=watcher.said)
    watcher.begin(world, heart)
    return watcher


def _watched(run: TrainingRun, watcher: Logged) -> None:
    watcher.follow([part.engine for part in run.parts.values()])
    if type(run.task).train is Task.train:
        with watcher.reading():
            run.feed  # noqa: B018 - made here, it is told from what trains
    run.log_memory(watcher)


@contextmanager
def _library(backend: Backend) -> Generator[None]:
    """What is installed and does not import is refused in its own words."""
    try:
        yield
    except ImportError as e:
        hint = f": {backend.hint}" if backend.hint else ""
        raise BackendNotInstalled(f"backend {backend.name!r} is installed and does not import ({e}){hint}") from e


Build = Callable[[Part, Config, World], Engine]


def assembled(
    settled: SettledConfig,
    backend: Backend,
    task: Task,
    world: World,
    *,
    ledger: Ledger,
    heart: Heart,
    trackers: Trackers,
    build: Build | None = None,
) -> TrainingRun:
    """The model, its engine (by `build` instead of the backend, if given) and the loop's side, in a world that met."""
    config, sizes = settled.config, settled.sizes
    if config.eval.every and not task.gives("validation"):
        raise TaskError("eval.every is given and the task has no validation(): give it a dataset, or leave eval out")
    config = config.changed({"batch.total": sizes.total})
    _prepare(task, world)
    base = anonymous_memory()
    modules = create_parts(task.model, config, world)
    whole = whole_of(modules)
    wanted = config.model.loading
    loaded = load(whole, wanted) if wanted is not None and world.rank == 0 else None  # the others receive the values
    parameters = sum(p.numel() for p in whole.parameters())
    own_optimizer = task.optimizer if task.gives("optimizer") else None
    parts: dict[str, Trained] = {}
    for name, module in modules.items():
        own = config.of_part(name)
        groups = parameter_groups(module, own, given=task.groups(module), own_optimizer=own_optimizer is not None)
        blocks = find_blocks(module, own, given=task.blocks(module))
        reworked(module, blocks, own)
        part = Part(name, module, optimizer_factory(groups, own, world.device, own=own_optimizer), blocks)
        with _library(backend):
            engine = (build or backend.build)(part, own, world)
            parts[name] = Trained(part, engine, own, world, alone=len(modules) == 1)
    if len(parts) > 1:
        for part in parts.values():  # some libraries settle in their first forward what takes gradients
            part.engine.evaluate(_nothing, None)
    said = {"rank": world.rank, "size": world.size, "cell": str(settled.cell), "pid": os.getpid()}
    ledger.note("start", **said, parameters=parameters, resident=base)
    if loaded is not None:
        ledger.note("weights", **asdict(loaded))
    return TrainingRun(task, parts, world, config, sizes, ledger=ledger, heart=heart, trackers=trackers)


def _nothing(model: nn.Module, given: None) -> None:
    """A forward that computes nothing."""


def _prepare(task: Task, world: World) -> None:
    """Once on each machine; the others wait as long as it takes: a download may be long."""
    if not task.gives("prepare"):
        return
    key = world.key(f"prepared/{world.rank - world.place.local_rank}")
    if world.place.local_rank == 0:
        task.prepare()
        if world.store is not None:
            world.store.set(key, "yes")
    while world.store is not None and not world.store.check([key]):
        time.sleep(0.05)
