"""First microbatches of the training data, for engines that try the model before the first step, and for scripts."""

from __future__ import annotations

from itertools import islice
from typing import Any

from unipar.config import BatchSizes, Config
from unipar.data.dataset import training_data_source
from unipar.data.feed import MicrobatchFeed
from unipar.errors import TaskError, UniparError
from unipar.task import Task


def first_microbatch(task: Task, config: Config, sizes: BatchSizes) -> Any:
    """Return the first microbatch of data() that counts, read apart from the training's data."""
    collate = task.collate if task.defines("collate") else None
    try:
        source = training_data_source(task.data(), collate, task.collate, config, sizes)
        if source.streams:
            return source.collate(list(islice(iter(source.dataset), sizes.micro)))
        feed = MicrobatchFeed(source, sizes, 0, config.train.seed)
        batch = feed.read(next(feed.plans(0))[0].keys)
        weight = task.weight(batch)
        if weight is not None and float(weight) == 0:
            batch = feed.batch_with_weight(lambda b: float(task.weight(b) or 0))
    except UniparError:
        raise
    except Exception as e:
        raise TaskError(
            f"{config.parallel.axes} tries the model on one microbatch of data() before the first step, and data() "
            f"gave none ({type(e).__name__}: {e}): let data() return the dataset that the training loop reads"
        ) from e
    return batch


def first_microbatches(task: Task, config: Config, sizes: BatchSizes, number: int) -> list[Any]:
    """Return the first microbatches of a map-style dataset, of all ranks; fewer if the first epoch has fewer."""
    collate = task.collate if task.defines("collate") else None
    source = training_data_source(task.data(), collate, task.collate, config, sizes)
    feed = MicrobatchFeed(source, sizes, None, config.train.seed)
    steps = islice(feed.plans(0), max(1, feed.order.per_epoch))
    plans = islice((plan for step in steps for plan in step), number)
    return [feed.read(plan.keys) for plan in plans]
