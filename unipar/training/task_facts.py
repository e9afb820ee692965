"""What only the task's own code can tell: its parameters, blocks and samples. Imports the user's file."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any

from unipar.config import Config, Sizes
from unipar.config.config import Data
from unipar.errors import TaskError, UniparError
from unipar.task import Task
from unipar.task.reference import TaskRef


@dataclass(frozen=True)
class Depth:
    parameters: int
    trained: int
    """Those of them that require a gradient."""

    parts: tuple[str, ...]
    """Names of several parts."""

    blocks: tuple[str, ...]
    samples: int | None
    """None for a stream that does not say."""

    per_epoch: int | None
    """Batches of `batch.total` in an epoch; None where nobody knows before it is over."""

    streams: str
    """How a stream is read; empty for a map-style dataset."""

    data: Mapping[str, Any]
    """Keys of `data` that the task's DataLoader says; they hold where the config does not."""

    taken: tuple[str, ...]
    """Its further arguments that are in force."""


def loaded(config: Config) -> Task:
    """The task, made; what its code prints goes to stderr, what it raises becomes a TaskError."""
    ref = TaskRef.of(None, config.task, {})
    ref.look()
    with _user_code("the task's file"):
        return ref.load()


def look_into(config: Config, sizes: Sizes) -> Depth:
    """Make the task's model, on meta where it can, and its data."""
    from unipar.data.dataset import source_of, training_source
    from unipar.data.order import Order
    from unipar.data.stream import STATED
    from unipar.model.blocks import find_blocks

    task = loaded(config)
    with _user_code("model()"):
        modules = _shapes(task)
    with _user_code("data()"):
        given = task.data()
        collate = task.collate if task.gives("collate") else None
        source = training_source(given, collate, task.collate, config, sizes)
        alone = config.model_copy(update={"data": Data()})
        theirs = source_of(given, collate, task.collate, alone, sizes).settings
        settings = source.settings
        samples = source.length
        per_epoch = None
        if samples is not None and settings.stream == "whole":
            per_epoch = Order(samples, sizes.total, config.train.seed, settings.shuffle, settings.ragged).per_epoch
    counts = [(p.numel(), p.requires_grad) for module in modules.values() for p in module.parameters()]
    blocks = {part: find_blocks(module, config, given=task.blocks(module)) for part, module in modules.items()}
    several = tuple(modules) if len(modules) > 1 else ()
    return Depth(
        parameters=sum(n for n, _ in counts),
        trained=sum(n for n, trained in counts if trained),
        parts=several,
        blocks=tuple(f"{part}.{n}" if several else n for part, names in blocks.items() for n in names),
        samples=samples,
        per_epoch=per_epoch,
        streams=STATED[settings.stream] if source.streams else "",
        data={name: getattr(theirs, name) for name in sorted(theirs.model_fields_set)},
        taken=tuple(name for name, value in source.taken.items() if value != _USUAL.get(name)),
    )


_USUAL = {"timeout": 0, "prefetch_factor": 2}
"""What a DataLoader says where nobody does; None of all others."""


def _shapes(task: Task) -> dict[str, Any]:
    import torch

    from unipar.model.create import parts_of

    try:
        with torch.device("meta"):
            made: Any = task.model()
    except (NotImplementedError, RuntimeError):  # a constructor that looks at values
        made = task.model()
    return parts_of(made)


@contextlib.contextmanager
def _user_code(what: str) -> Generator[None]:
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except UniparError:
        raise
    except Exception as e:
        frames = traceback.extract_tb(e.__traceback__)
        last = next((f for f in reversed(frames) if "site-packages" not in f.filename), frames[-1])
        raise TaskError(f"{what} raised {type(e).__name__}: {e} ({last.filename}, line {last.lineno})") from e
