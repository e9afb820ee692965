"""Set-up of a run on one rank: join the world, create the model, let the backend build engines."""

from __future__ import annotations

import gc
import os
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unipar.backend import Backend, Engine, Part
from unipar.backend.file_values import RestoredValues, set_file_values
from unipar.backend.offered_strategies import ONE
from unipar.backend.precision import FP8_RECIPES
from unipar.config import Config
from unipar.config.sections.model import RecomputeFit
from unipar.config.settled import SettledConfig
from unipar.distributed.device import device_name, forget_peaks, has_own_memory, release_unused_memory
from unipar.distributed.place import Place
from unipar.distributed.world import World, leave_current_world
from unipar.engines.averages.engine import with_averages
from unipar.errors import BackendNotInstalled, ConfigError, Stopped, TaskError
from unipar.model.blocks import find_blocks
from unipar.model.create import combine_parts, create_parts, refuse_devices_by_hand
from unipar.model.fp8_linears import choose_kernel, convert_to_fp8, fp8_linears_of
from unipar.model.modes import enter_training_mode
from unipar.model.parameter_groups import OptimizerFactory, parameter_groups, refuse_whole_matrices
from unipar.model.pretrained import LoadedWeights, load_weights, point_to_weights
from unipar.model.state_names import state_names
from unipar.model.transforms import apply_transforms
from unipar.planning.machines.device_peaks import find_device_peaks
from unipar.planning.recompute_choice import Recompute, RecomputeChoice
from unipar.profiling.fake_model import FakeModel
from unipar.profiling.observer import StepObserver
from unipar.run_folder.heartbeat import HeartbeatWriter
from unipar.run_folder.layout import checkpoint_folder, heartbeat_path, read_launch_file, run_log_path
from unipar.run_folder.run_attempts import count_attempts
from unipar.run_folder.run_log import RunLog
from unipar.task import Task
from unipar.tracking.writer import TrackerWriter
from unipar.training.local_batches import first_microbatch, first_microbatches
from unipar.training.out_of_memory import explain_out_of_memory, is_out_of_memory
from unipar.training.stopping import stop_on_signals, stop_reason
from unipar.training.task_facts import prepare_task
from unipar.training.trained_parts import OfOptimizer, TrainedPart, tied_names
from unipar.training.training_run import TrainingRun
from unipar.training.watch.state_watch import watched_dtypes
from unipar.utils.malloc_settings import is_malloc_set_by_environment, keep_freed_memory
from unipar.utils.procfs import anonymous_memory, peak_resident_bytes
from unipar.utils.seeding import kept_random_state

if TYPE_CHECKING:
    from torch import nn

    from unipar.data.microbatch_loader import MicrobatchLoader
    from unipar.memory.recording.memory_log import StepMemory
    from unipar.model.safetensors_files import SafetensorsFiles
    from unipar.training.resuming import ChosenCheckpoint


@contextmanager
def open_run(
    settled: SettledConfig,
    backend: Backend,
    task: Task,
    place: Place,
    run: Path,
    *,
    met: Callable[[World, HeartbeatWriter], None] | None = None,
    at_end: Callable[[World], None] | None = None,
    plan_recompute: Callable[[SettledConfig, Task], RecomputeChoice] | None = None,
) -> Generator[TrainingRun]:
    """Context manager: a run that is ready to train; if the body succeeds, the world is closed on exit.

    `backend` is that of the settled strategy. `met` is called when the ranks have met, before anything is built;
    `at_end` when this rank's run log is complete. `plan_recompute` chooses blocks under `model.recompute: {fit: ...}`;
    without it all are recomputed.
    """
    config = settled.config
    heartbeat = HeartbeatWriter(heartbeat_path(run, place.rank))
    launched = read_launch_file(run)
    deadline = _deadline(config, launched, place.rank)
    with stop_on_signals(deadline), RunLog(run_log_path(run, place.rank)) as run_log, ExitStack() as failed:
        if place.size == 1 or not place.started_by_unipar:
            failed.callback(leave_current_world)  # such a process may go on after an error; unipar's workers exit
        recompute: RecomputeChoice | str | None = None
        if isinstance(config.model.recompute, RecomputeFit) and plan_recompute is not None:
            recompute = _try_plan(plan_recompute, settled, task) if place.rank == 0 else ""
        with _explain_import_error(backend):
            world = backend.join(settled.on_device, place)
        if world.device.type == "cpu" and not is_malloc_set_by_environment():
            keep_freed_memory()
        if met is not None:
            met(world, heartbeat)
        chosen, after = _choose_checkpoint(config, run, launched, world, run_log, heartbeat)
        watcher = _make_step_memory(config, backend, world, run, heartbeat, run_log)
        config_values = config.model_dump(mode="json")
        trackers = TrackerWriter(config.log.to, run, place.rank, config_values, run_log.note, after=after)
        resumes = chosen is not None
        build = partial(build_run, settled, backend, task, world, heartbeat=heartbeat, recompute=recompute)
        with explain_out_of_memory(run, place.rank):
            tried = _try_largest(build, world, run_log, trackers) if config.batch.memory_check else None
            live = build(run_log=run_log, trackers=trackers, resumes=resumes)
        if tried is not None:
            live.use_loader(tried)
        if place.rank == 0 and (micro := launched.get("micro")) is not None:
            run_log.note("micro", **micro)
        _keep_state(live, run, launched, chosen)
        if watcher is not None:
            _attach_step_memory(live, watcher)
        _attach_trace(live, run, heartbeat, failed)
        gc.collect()  # frees what is in reference cycles: rank 0's whole model, if it was split
        try:
            yield live
        except Stopped:
            live.end_trace()
            run_log.note("stopped", step=live.done, why=stop_reason())
            trackers.close()
            raise
        live.finish()
        planned = {"of": live.known_steps, "epochs": config.train.epochs}
        run_log.note("end", steps=live.done, **planned, peak_rss=peak_resident_bytes())
        if at_end is not None:
            at_end(world)
        world.barrier()  # no rank reads run logs before all of them are complete
        _close_engines(live)
        world.close()
        failed.pop_all()


def _close_engines(live: TrainingRun) -> None:
    for part in live.parts.values():
        part.engine.close()


def _try_largest(
    build: Callable[..., TrainingRun], world: World, run_log: RunLog, trackers: TrackerWriter
) -> MicrobatchLoader:
    """Try the largest microbatches on a model that is thrown away, note it, and return the loader that has measured."""
    from unipar.training.warm_up.largest import try_largest

    with RunLog(Path(os.devnull)) as unread:
        live = build(run_log=unread, trackers=trackers)
        loader, sentence = try_largest(live, is_out_of_memory)
        _close_engines(live)
        del live
    gc.collect()
    if has_own_memory(world.device):
        release_unused_memory(world.device)
        forget_peaks(world.device)
    if world.rank == 0:
        run_log.note("data", said=sentence)
    return loader


def _choose_checkpoint(
    config: Config, run: Path, launched: Mapping[str, Any], world: World, run_log: RunLog, heartbeat: HeartbeatWriter
) -> tuple[ChosenCheckpoint | None, int | None]:
    """Return the checkpoint from which the run goes on, verified by all ranks together; None to begin anew.

    And the step after which it goes on in the folder of an earlier attempt; None if this is the first one in it.
    """
    earlier, chosen, step = count_attempts(run), None, None
    again = earlier > 0 or config.resume == "auto"
    folder = checkpoint_folder(run, config.checkpoint.to if config.checkpoint else None)
    if config.resume not in (None, "never"):
        from unipar.training.resuming import choose_checkpoint

        keys, progress = launched.get("said", []), partial(heartbeat.set_work, "verifying the checkpoint")
        chosen = choose_checkpoint(config.resume, folder, world, config, keys, progress, again=again)
        heartbeat.set_work("")
        if chosen is not None:  # what has changed since the attempt before is shown with its origin
            shown = {change["key"] for change in launched.get("changes", ())}
            chosen = replace(chosen, changes=tuple(change for change in chosen.changes if change.key not in shown))
    if again:  # in the folder of an earlier attempt, which may have had more ranks
        step = 0 if chosen is None or chosen.path.parent != folder else chosen.step
        run_log.continue_after(step, attempt=earlier + 1)
        if world.rank == 0:
            for rank in count(world.size):
                if not (path := run_log_path(run, rank)).exists():
                    break
                RunLog.trim(path, step)
    if world.rank == 0 and (lines := launched.get("lines")):
        run_log.note("config", said=lines)
    return chosen, step


def _deadline(config: Config, launched: Mapping[str, Any], rank: int) -> float | None:
    """Return the time of time.monotonic() at which rank 0 stops the run; None on other ranks, which learn of it."""
    began: float | None = launched.get("launched")
    if config.launch.deadline is None or began is None or rank != 0:
        return None
    return began + config.launch.deadline


def _keep_state(live: TrainingRun, run: Path, launched: Mapping[str, Any], chosen: ChosenCheckpoint | None) -> None:
    """Have the state of a run saved, as the config says, and give it that of the checkpoint from which it goes on."""
    settings, keeper = live.config.checkpoint, None
    if settings is not None:
        from unipar.training.saves import RunCheckpoints

        keeper = RunCheckpoints(settings, live, run, launched)
        live.use_checkpoints(keeper)
    if chosen is not None:
        from unipar.training.resuming import restore_run

        if keeper is None:
            restore_run(live, chosen)
        else:
            restore_run(live, chosen, keeper.after_restore)
            keeper.go_on_from(chosen.step, chosen.state)
    if keeper is not None:
        keeper.check_folder()


def _make_step_memory(
    config: Config, backend: Backend, world: World, run: Path, heartbeat: HeartbeatWriter, run_log: RunLog
) -> StepMemory | None:
    """Return the recorder for `log.memory`, or None without it; its modules are imported only if needed."""
    if not config.log.memory:
        return None
    from unipar.memory.recording.memory_log import choose_step_memory

    watcher = choose_step_memory(backend, world, run)
    run_log.note("memory", said=watcher.said)
    watcher.begin(world, heartbeat)
    return watcher


def _attach_step_memory(run: TrainingRun, watcher: StepMemory) -> None:
    watcher.follow([part.engine for part in run.parts.values()])
    if type(run.task).train is Task.train:
        with watcher.reading():
            run.loader  # noqa: B018 - made here, its memory is not counted as the model's
    run.attach_step_memory(watcher)


def _attach_trace(run: TrainingRun, folder: Path, heartbeat: HeartbeatWriter, failed: ExitStack) -> None:
    """Trace the steps of `log.trace`, if it is given; its modules are imported only then. `failed`: after an error."""
    settings = run.config.log.trace
    if settings is None:
        return
    first, last = settings.steps
    if run.done >= last:
        run.note("no trace", said=f"the run goes on after step {run.done}, and log.trace.steps are [{first}, {last}]")
        return
    from unipar.training.tracing.step_trace import StepTracer

    engines = [part.engine for part in run.parts.values()]
    trace = StepTracer(settings, run.world, folder, heartbeat, engines, run.note, memory=run.config.log.memory)
    failed.callback(trace.drop)
    run.attach_trace(trace)


@contextmanager
def _explain_import_error(backend: Backend) -> Generator[None]:
    """Context manager: turn an ImportError of the backend's library into BackendNotInstalled with its text."""
    try:
        yield
    except ImportError as e:
        hint = f": {backend.hint}" if backend.hint else ""
        raise BackendNotInstalled(f"backend {backend.name!r} is installed and cannot be imported ({e}){hint}") from e


EngineFactory = Callable[[Part, Config, World], Engine]
"""Function that builds the engine of a part, like `Backend.build`."""


def build_run(
    settled: SettledConfig,
    backend: Backend,
    task: Task,
    world: World,
    *,
    run_log: RunLog,
    heartbeat: HeartbeatWriter,
    trackers: TrackerWriter,
    build: EngineFactory | None = None,
    resumes: bool = False,
    prepared: bool = False,
    counts: bool = True,
    recompute: RecomputeChoice | str | None = None,
) -> TrainingRun:
    """Create the model, its engines (by `build`, if given, instead of the backend) and the run, in a joined world.

    `resumes`: a checkpoint is read next, so that the model needs neither values nor the file of `model.weights`.
    `prepared`: the task's `prepare` was called; again, it might write what another rank reads. `counts`: the operations
    of a step are counted in the first. `recompute`: choice of rank 0 under `fit`, or its error; None: there is none.
    """
    config, sizes = settled.config, settled.sizes
    if config.eval.every and not task.defines("validation"):
        raise TaskError("eval.every is given and the task has no validation(): give it a dataset, or leave eval out")
    if sizes.tokens is None:
        config = config.changed({"batch.total": sizes.total})
    world.lay(**config.parallel.axes.sizes)
    if not prepared:
        _prepare_once_per_machine(task, world)
    if recompute is not None:
        config = config.changed({"model.recompute": _share_recompute(recompute, world, run_log)})
    base = anonymous_memory()
    may_be_empty = build is None and backend.fills_from_files(config)
    modules, loaded, files = _create_model(task, config, world, resumes=resumes, may_be_empty=may_be_empty)
    model = combine_parts(modules)
    modes = enter_training_mode(model, keep=task.keep_modes).describe()
    if settled.strategy != ONE:
        refuse_devices_by_hand(model, world.device, settled.strategy)
    parameters = sum(p.numel() for p in model.parameters())
    in_blocks: Counter[str] = Counter()
    own_optimizer = task.optimizer if task.defines("optimizer") else None
    if own_optimizer is not None and config.parallel.tensor > 1:
        refuse_whole_matrices(own_optimizer, config.parallel.tensor)
    parts: dict[str, TrainedPart] = {}
    work = _make_observer(config, modules, world) if counts else StepObserver(world, counts=False)
    for name, module in modules.items():
        own = config.of_part(name)
        groups = parameter_groups(module, own, task_groups=task.groups(module), own_optimizer=own_optimizer is not None)
        blocks, tied = find_blocks(module, own, patterns=task.blocks(module)), tied_names(module)
        names = state_names(module)
        if config.parallel.axes.split:
            in_blocks.update(_count_in_blocks(module, blocks))
        dtypes = watched_dtypes(module.named_parameters())
        if own.train.precision in FP8_RECIPES:
            convert_to_fp8(module, blocks, own, choose_kernel(world.device, own.train.precision))
        apply_transforms(module, blocks, own)
        factory = OptimizerFactory(groups, own, world.device, own=own_optimizer)
        part = Part(
            name,
            module,
            factory,
            blocks,
            loss=task.loss,
            sample=partial(first_microbatch, task, config, sizes),
            samples=partial(first_microbatches, task, config, sizes),
            experts=task.experts(module) if config.parallel.expert > 1 else None,
            tensor=task.tensor(module),
            cuts=task.cuts(config.parallel.axes.stages),
        )
        with _explain_import_error(backend):
            engine = with_averages((build or backend.build)(part, own, world), own.train.ema)
            alone = len(modules) == 1
            made = OfOptimizer(factory.made, factory.rates, dtypes)
            parts[name] = TrainedPart(part, engine, own, world, alone=alone, tied=tied, names=names, made=made)
    if len(parts) > 1:
        for part in parts.values():  # some libraries fix in the first forward which parameters take gradients
            part.engine.evaluate(_compute_nothing, None)
    process = {"rank": world.rank, "size": world.size, "strategy": str(settled.strategy), "pid": os.getpid()}
    run_log.note("start", **process, parameters=parameters, **in_blocks, resident=base)
    if modes and world.rank == 0:
        run_log.note("training mode", said=modes)
    for part in parts.values():
        if (fp8 := fp8_linears_of(part.module)) is not None and world.rank == 0:
            run_log.note("precision", said=fp8.describe())
    if loaded is not None and world.rank == 0:
        run_log.note("weights", **asdict(loaded))
    if files is not None:
        run_log.note("weights read", bytes=files.bytes_read)
    return TrainingRun(
        task, parts, world, config, sizes, run_log=run_log, heartbeat=heartbeat, trackers=trackers, work=work
    )


def _try_plan(
    plan: Callable[[SettledConfig, Task], RecomputeChoice], settled: SettledConfig, task: Task
) -> RecomputeChoice | str:
    """Return the blocks that a plan chooses to recompute, or the sentence of its error, for all ranks.

    Ranks meet behind it: the plan of a split model has process groups of its own.
    """
    prepare_task(task)
    with kept_random_state():
        try:
            return plan(settled, task)
        except ConfigError as e:
            return str(e)


def _share_recompute(choice: RecomputeChoice | str, world: World, run_log: RunLog) -> Recompute:
    """Return the blocks that rank 0 has chosen to recompute, and note them; raise ConfigError on all ranks."""
    choice = world.tell_objects(choice, 0)
    if isinstance(choice, str):
        raise ConfigError(choice)
    if world.rank == 0:
        run_log.note("recomputed blocks", said=choice.says, names=list(choice.names))
    return choice.recompute


def _make_observer(config: Config, modules: Mapping[str, nn.Module], world: World) -> StepObserver:
    """Return the observer of the run's steps, with a copy of the model without values where it is needed."""
    splits, compiles = config.parallel.axes.split, config.model.compiling is not None
    peak, fake, why = None, None, ""
    if has_own_memory(world.device):
        device = find_device_peaks(device_name(world.device))
        peak = None if device is None else device.flops.get(config.train.precision)
    if (splits or compiles) and world.rank == 0:
        if len(modules) > 1:
            why = f"model() returned several parts ({', '.join(modules)})"
        else:
            try:
                fake = FakeModel(next(iter(modules.values())))
            except Exception as e:  # the model's own code, which may refuse to be copied
                why = f"the model cannot be copied ({type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''})"
    return StepObserver(world, splits=splits, compiles=compiles, fake=fake, why_no_fake=why, peak=peak)


def _create_model(
    task: Task, config: Config, world: World, *, resumes: bool, may_be_empty: bool
) -> tuple[dict[str, nn.Module], LoadedWeights | None, SafetensorsFiles | None]:
    """Return the model's parts, what was taken from `model.weights`, and the files that will be read as it is placed.

    `may_be_empty`: the engine asks for a parameter's values when it places it, so that rank 0 need not have them all.
    """
    wanted = None if resumes else config.model.loading
    empty = may_be_empty and (resumes or wanted is not None)
    modules = create_parts(task.model, config, world, empty=empty)
    model = combine_parts(modules)
    if resumes and empty:
        for p in model.parameters():
            set_file_values(p, RestoredValues())
    if wanted is None:
        return modules, None, None
    if empty:
        if (pointer := point_to_weights(model, wanted)) is not None:
            return modules, *pointer
        modules = create_parts(task.model, config, world)  # some parameters keep their initial values
        model = combine_parts(modules)
    # other ranks get the values from rank 0 when tensors are placed
    return modules, load_weights(model, wanted) if world.rank == 0 else None, None


def _count_in_blocks(module: nn.Module, blocks: Sequence[str]) -> dict[str, int]:
    """Return the number of blocks and of their parameters, for estimates of what a rank holds (`ModelSize`)."""
    named = {id(p): p for block in blocks for p in module.get_submodule(block).parameters()}
    sizes = [(p.ndim, p.numel()) for p in named.values()]
    matrices = sum(size for ndim, size in sizes if ndim > 1)
    stacked = sum(size for ndim, size in sizes if ndim == 3)
    return {"blocks": len(blocks), "in_blocks": sum(s for _, s in sizes), "matrices": matrices, "experts": stacked}


def _compute_nothing(model: nn.Module, inputs: None) -> None:
    """Compute nothing: the function of a forward that only triggers the library's own set-up."""


def _prepare_once_per_machine(task: Task, world: World) -> None:
    """Call the task's `prepare` on one rank of each machine; others wait without a limit, as it may download data."""
    if not task.defines("prepare"):
        return
    key, leads = world.key("prepared"), world.machines.leads(world.rank)
    if leads:
        task.prepare()
    if world.tree is not None:
        world.tree.tell_machine(f"{world.launch}/{key}", "yes" if leads else None)
        return
    if leads and world.store is not None:
        world.store.set(key, "yes")
    while world.store is not None and not world.store.check([key]):
        time.sleep(0.05)
