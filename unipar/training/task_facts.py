"""Facts that only the task's own code knows: its parameters, blocks and samples. Imports the user's file."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from unipar.backend import Backend, Part
from unipar.config import BatchSizes, Config
from unipar.config.config import Data
from unipar.errors import TaskError, UniparError
from unipar.task import Task
from unipar.task.reference import TaskRef
from unipar.utils.files import is_library_file

if TYPE_CHECKING:
    from torch import nn

    from unipar.model.modes import TrainingModes
    from unipar.model.state_names import CheckpointBytes


@dataclass(frozen=True)
class TaskFacts:
    """Facts about a task's model and data."""

    parameters: int
    trainable_parameters: int
    """Number of parameters that require a gradient."""

    parts: tuple[str, ...]
    """Names of the parts; empty if there is only one."""

    blocks: tuple[str, ...]
    samples: int | None
    """Number of samples; unknown (None) for a stream without a length."""

    per_epoch: int | None
    """Number of batches in an epoch, under `batch.tokens` in the first; None if it is known only after the epoch."""

    steps: int | None
    """Optimizer steps of `train.epochs`; None without that key, or if it is known only after the epochs."""

    stream_description: str
    """Description of how a stream is read; empty for a map-style dataset."""

    data: Mapping[str, Any]
    """Keys of `data` that the task's DataLoader sets; each applies unless the config sets it."""

    loader_arguments: tuple[str, ...]
    """Names of further DataLoader arguments that differ from their defaults."""

    sampler: str
    """Class of the DataLoader's own sampler, which gives the order; empty if unipar draws it."""

    modes: TrainingModes
    """Modules that are put into training mode, and those in eval mode."""

    fp8: str
    """Linear layers that multiply in fp8, and those that do not, as a sentence; "" in another precision."""

    checkpoint: CheckpointBytes | None
    """Bytes of tensors in a checkpoint; None without a section `checkpoint`, or if the optimizer cannot be tried."""


def load_task(config: Config, *, prepared: bool = True) -> Task:
    """Create the config's task and call its `prepare`; its code prints to stderr, its exceptions become TaskErrors."""
    ref = TaskRef.of(None, config.task, {})
    ref.check_code()
    with user_errors_as_task_errors("the task's file"):
        task = ref.load()
    if prepared:
        prepare_task(task)
    return task


def prepare_task(task: Task) -> None:
    """Call the task's `prepare`, which comes before its model and data; raise TaskError for its exceptions."""
    if task.defines("prepare"):
        with user_errors_as_task_errors("prepare()"):
            task.prepare()


def gather_task_facts(config: Config, sizes: BatchSizes) -> TaskFacts:
    """Create the task's model (on meta, if possible) and its data, and return facts about them."""
    from unipar.data.dataset import data_source_of, training_data_source
    from unipar.data.lengths import measure_lengths
    from unipar.data.microbatch_loader import MicrobatchLoader
    from unipar.data.order import SampleOrder
    from unipar.data.stream import STREAM_PROMISES
    from unipar.data.token_order import TokenOrder
    from unipar.model.blocks import find_blocks
    from unipar.model.create import combine_parts
    from unipar.model.modes import enter_training_mode

    task = load_task(config)
    with user_errors_as_task_errors("model()"):
        modules = _make_parts_on_meta(task)
    with user_errors_as_task_errors("data()"):
        data = task.data()
        collate = task.collate if task.defines("collate") else None
        source = training_data_source(data, collate, task.collate, config, sizes)
        without_data = config.model_copy(update={"data": Data()})
        of_loader = data_source_of(data, collate, task.collate, without_data, sizes).settings
        settings = source.settings
        samples = source.length
        per_epoch = None
        steps = None
        if samples is not None and settings.stream == "whole":
            order: SampleOrder | TokenOrder
            if source.streams:
                order = SampleOrder(samples, sizes.total, config.train.seed, settings.shuffle, settings.last_batch)
            else:
                lengths = measure_lengths(task, source.dataset, config.train.seed, sizes)
                order = MicrobatchLoader(source, sizes, 0, config.train.seed, lengths=lengths).order
            per_epoch = order.per_epoch
            steps = order.steps(config.train.epochs or 1)
    counts = [(p.numel(), p.requires_grad) for module in modules.values() for p in module.parameters()]
    blocks = {part: find_blocks(module, config, patterns=task.blocks(module)) for part, module in modules.items()}
    several = tuple(modules) if len(modules) > 1 else ()
    return TaskFacts(
        parameters=sum(n for n, _ in counts),
        trainable_parameters=sum(n for n, trained in counts if trained),
        parts=several,
        blocks=tuple(f"{part}.{n}" if several else n for part, names in blocks.items() for n in names),
        samples=samples,
        per_epoch=per_epoch,
        steps=steps if config.train.epochs is not None else None,
        stream_description=STREAM_PROMISES[settings.stream] if source.streams else "",
        data={name: getattr(of_loader, name) for name in sorted(of_loader.model_fields_set)},
        loader_arguments=tuple(
            name for name, value in source.loader_arguments.items() if value != _LOADER_DEFAULTS.get(name)
        ),
        sampler="" if source.sampler is None else type(source.sampler).__name__,
        modes=enter_training_mode(combine_parts(modules), keep=task.keep_modes),
        checkpoint=None if config.checkpoint is None else checkpoint_bytes(task, modules, config),
        fp8="; ".join(_describe_fp8(modules, blocks, config)),
    )


def _describe_fp8(
    modules: Mapping[str, nn.Module], blocks: Mapping[str, Sequence[str]], config: Config
) -> Iterator[str]:
    """Yield which linear layers of each part multiply in fp8 on the config's device; nothing in another precision."""
    from unipar.backend.resources import choose_device
    from unipar.model.fp8_linears import convert_to_fp8, fp8_linears_of

    kernel = "emulated in fp32" if choose_device(config)[0] == "cpu" else "torch._scaled_mm"
    for name, module in modules.items():
        convert_to_fp8(module, blocks[name], config, kernel, planned=True)
        if (fp8 := fp8_linears_of(module)) is not None:
            yield fp8.describe()


def checkpoint_bytes(task: Task, modules: Mapping[str, Any], config: Config) -> CheckpointBytes | None:
    """Return the bytes of tensors in checkpoints of these parts; None if the optimizer cannot be tried."""
    import torch

    from unipar.model.parameter_groups import OptimizerFactory, parameter_groups
    from unipar.model.saved_size import frozen_bytes, saved_bytes
    from unipar.model.state_names import CheckpointBytes, saves_frozen_once, state_names

    total, shared, custom = 0, 0, task.optimizer if task.defines("optimizer") else None
    try:
        once = saves_frozen_once(config, [one for module in modules.values() for one in state_names(module).configs])
        for name, module in modules.items():
            own = config.of_part(name)
            groups = parameter_groups(module, own, task_groups=task.groups(module), own_optimizer=custom is not None)
            make = OptimizerFactory(groups, own, torch.device("meta"), own=custom)
            size = saved_bytes(module, make, fp64=config.train.precision == "fp64")
            if size is None:
                return None
            total += size
            shared += frozen_bytes(module, fp64=config.train.precision == "fp64") if once else 0
    except Exception:  # what is wrong with the task's groups or optimizer is told where they are used
        return None
    return CheckpointBytes(total - shared, shared)


def describe_split(config: Config, sizes: BatchSizes, backend: Backend) -> list[str]:
    """Return how the backend would split the blocks of the task's model over the ranks of one sample, as sentences."""
    task = load_task(config)
    with user_errors_as_task_errors("model()"):
        ((name, module),) = _make_parts_on_meta(task).items()
    part = _part_of(task, name, module, config, sizes)
    with user_errors_as_task_errors("loss()"):
        return list(backend.plan_split(part, config))


def load_part(config: Config, sizes: BatchSizes) -> tuple[Part, Callable[[int], list[Any]]]:
    """Create the task's model with its values; return it, and a function that reads the first microbatches.

    The task is prepared, as `gather_task_facts` leaves it. The model is that of seed `train.seed`; random generators
    are left as they were.
    """
    import torch

    from unipar.model.create import check_parts
    from unipar.model.modes import enter_training_mode
    from unipar.training.local_batches import first_microbatches

    task = load_task(config, prepared=False)
    with user_errors_as_task_errors("model()"), torch.random.fork_rng([]):
        made: Any = task.model()
        ((name, module),) = check_parts(made).items()
    enter_training_mode(module, keep=task.keep_modes)

    def samples(number: int) -> list[Any]:
        with user_errors_as_task_errors("data()"):
            return first_microbatches(task, config, sizes, number)

    return _part_of(task, name, module, config, sizes), samples


def cuts_of_task(task: Task, stages: int) -> tuple[str, ...] | None:
    """Return the blocks with which the task lets the second and each further stage begin, or None."""
    with user_errors_as_task_errors("cuts()"):
        names = task.cuts(stages)
        return None if names is None else tuple(names)


def _part_of(task: Task, name: str, module: Any, config: Config, sizes: BatchSizes) -> Part:
    from unipar.model.blocks import find_blocks
    from unipar.training.local_batches import first_microbatch, first_microbatches

    return Part(
        name,
        module,
        optimizer=lambda model: _no_optimizer(),
        blocks=find_blocks(module, config, patterns=task.blocks(module)),
        loss=task.loss,
        sample=partial(first_microbatch, task, config, sizes),
        samples=partial(first_microbatches, task, config, sizes),
        experts=task.experts(module) if config.parallel.expert > 1 else None,
        tensor=task.tensor(module),
    )


def _no_optimizer() -> Any:
    raise AssertionError("nothing is trained")


_LOADER_DEFAULTS = {"timeout": 0, "prefetch_factor": 2}
"""Default values of DataLoader arguments; all others default to None."""


def _make_parts_on_meta(task: Task) -> dict[str, Any]:
    import torch

    from unipar.model.create import check_parts

    try:
        with torch.device("meta"):
            model: Any = task.model()
    except (NotImplementedError, RuntimeError):  # the constructor reads values, which meta tensors do not have
        model = task.model()
    return check_parts(model)


@contextlib.contextmanager
def user_errors_as_task_errors(what: str) -> Generator[None]:
    """Context manager: turn an exception of the user's code in `what` into a TaskError; send its prints to stderr."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except UniparError:
        raise
    except Exception as e:
        frames = traceback.extract_tb(e.__traceback__)
        own = (f for f in reversed(frames) if not is_library_file(f.filename))
        last = next(own, frames[-1])
        raise TaskError(f"{what} raised {type(e).__name__}: {e} ({last.filename}, line {last.lineno})") from e
