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
from unipar.distributed.world import World, leave_current_world
from unipar.errors import BackendNotInstalled, Stopped, TaskError
from unipar.model.blocks import find_blocks
from unipar.model.create import combine_parts, create_parts
from unipar.model.optimizer import optimizer_factory, parameter_groups
from unipar.model.pretrained import load_weights
from unipar.model.transforms import apply_transforms
from unipar.run_folder.heartbeat import HeartbeatWriter
from unipar.run_folder.layout import heartbeat_path, ledger_path
from unipar.run_folder.ledger import Ledger
from unipar.task import Task
from unipar.tracking.writer import TrackerWriter
from unipar.training.out_of_memory import explain_out_of_memory
from unipar.training.parts import TrainedPart
from unipar.training.run import TrainingRun
from unipar.training.stopping import stop_on_signals
from unipar.utils.procfs import anonymous_memory, peak_resident_bytes

if TYPE_CHECKING:
    from torch import nn

    from unipar.memory.recording.step_log import StepMemory


@contextmanager
def open_run(
    settled: SettledConfig,
    backend: Backend,
    task: Task,
    place: Place,
    run: Path,
    *,
    met: Callable[[World, HeartbeatWriter], None] | None = None,
) -> Generator[TrainingRun]:
    """A run that is ready to train; its world is left in order when the body ends well.

    `backend` is that of the settled cell. `met` is called when the ranks have met and nothing is built.
    """
    config = settled.config
    heart = HeartbeatWriter(heartbeat_path(run, place.rank))
    with stop_on_signals(), Ledger(ledger_path(run, place.rank)) as ledger, ExitStack() as failed:
        if (
            place.size == 1 or not place.started_by_unipar
        ):  # a process that goes on after an error; a worker of ours ends at once
            failed.callback(leave_current_world)
        with _explain_import_error(backend):
            world = backend.join(config, place)
        if met is not None:
            met(world, heart)
        watcher = _make_step_memory(config, backend, world, run, heart, ledger)
        trackers = TrackerWriter(config.log.to, run, place.rank, config.model_dump(mode="json"), ledger.note)
        with explain_out_of_memory(run, place.rank):
            made = build_run(settled, backend, task, world, ledger=ledger, heart=heart, trackers=trackers)
        if watcher is not None:
            _attach_step_memory(made, watcher)
        gc.collect()  # what building left in cycles: rank 0's whole model, where it was split
        try:
            yield made
        except Stopped:
            ledger.note("stopped", step=made.done)
            trackers.close()
            raise
        made.finish()
        ledger.note("end", steps=made.done, peak_rss=peak_resident_bytes())
        world.barrier()  # every rank's ledger is whole before any rank reads it
        for part in made.parts.values():
            part.engine.close()
        world.close()
        failed.pop_all()


def _make_step_memory(
    config: Config, backend: Backend, world: World, run: Path, heart: HeartbeatWriter, ledger: Ledger
) -> StepMemory | None:
    """`log.memory`; without it nothing of that is loaded."""
    if not config.log.memory:
        return None
    from unipar.memory.recording.step_log import choose_step_memory

    watcher = choose_step_memory(backend, world, run)
    ledger.note("memory", said=watcher.said)
    watcher.begin(world, heart)
    return watcher


def _attach_step_memory(run: TrainingRun, watcher: StepMemory) -> None:
    watcher.follow([part.engine for part in run.parts.values()])
    if type(run.task).train is Task.train:
        with watcher.reading():
            run.feed  # noqa: B018 - made here, it is told from what trains
    run.attach_step_memory(watcher)


@contextmanager
def _explain_import_error(backend: Backend) -> Generator[None]:
    """What is installed and does not import is refused in its own words."""
    try:
        yield
    except ImportError as e:
        hint = f": {backend.hint}" if backend.hint else ""
        raise BackendNotInstalled(f"backend {backend.name!r} is installed and does not import ({e}){hint}") from e


EngineFactory = Callable[[Part, Config, World], Engine]


def build_run(
    settled: SettledConfig,
    backend: Backend,
    task: Task,
    world: World,
    *,
    ledger: Ledger,
    heart: HeartbeatWriter,
    trackers: TrackerWriter,
    build: EngineFactory | None = None,
) -> TrainingRun:
    """The model, its engine (by `build` instead of the backend, if given) and the loop's side, in a world that met."""
    config, sizes = settled.config, settled.sizes
    if config.eval.every and not task.defines("validation"):
        raise TaskError("eval.every is given and the task has no validation(): give it a dataset, or leave eval out")
    config = config.changed({"batch.total": sizes.total})
    _prepare_once_per_machine(task, world)
    base = anonymous_memory()
    modules = create_parts(task.model, config, world)
    whole = combine_parts(modules)
    wanted = config.model.loading
    loaded = (
        load_weights(whole, wanted) if wanted is not None and world.rank == 0 else None
    )  # the others receive the values
    parameters = sum(p.numel() for p in whole.parameters())
    own_optimizer = task.optimizer if task.defines("optimizer") else None
    parts: dict[str, TrainedPart] = {}
    for name, module in modules.items():
        own = config.of_part(name)
        groups = parameter_groups(module, own, given=task.groups(module), own_optimizer=own_optimizer is not None)
        blocks = find_blocks(module, own, given=task.blocks(module))
        apply_transforms(module, blocks, own)
        part = Part(name, module, optimizer_factory(groups, own, world.device, own=own_optimizer), blocks)
        with _explain_import_error(backend):
            engine = (build or backend.build)(part, own, world)
            parts[name] = TrainedPart(part, engine, own, world, alone=len(modules) == 1)
    if len(parts) > 1:
        for part in parts.values():  # some libraries settle in their first forward what takes gradients
            part.engine.evaluate(_compute_nothing, None)
    said = {"rank": world.rank, "size": world.size, "cell": str(settled.cell), "pid": os.getpid()}
    ledger.note("start", **said, parameters=parameters, resident=base)
    if loaded is not None:
        ledger.note("weights", **asdict(loaded))
    return TrainingRun(task, parts, world, config, sizes, ledger=ledger, heart=heart, trackers=trackers)


def _compute_nothing(model: nn.Module, given: None) -> None:
    """A forward that computes nothing."""


def _prepare_once_per_machine(task: Task, world: World) -> None:
    """Once on each machine; the others wait as long as it takes: a download may be long."""
    if not task.defines("prepare"):
        return
    key = world.key(f"prepared/{world.rank - world.place.local_rank}")
    if world.place.local_rank == 0:
        task.prepare()
        if world.store is not None:
            world.store.set(key, "yes")
    while world.store is not None and not world.store.check([key]):
        time.sleep(0.05)
