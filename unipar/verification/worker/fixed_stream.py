"""A stream's first samples, read once and held: every cell, rank and replay takes its own from the same ones."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader

from unipar.config.config import Data
from unipar.config.settled import SettledConfig
from unipar.data.dataset import DataSource, training_data_source
from unipar.data.stream import seeded_samples
from unipar.errors import ConfigError
from unipar.task import Task
from unipar.training.fingerprint import fingerprint_batch


def fix_stream_samples(task: Task, settled: SettledConfig, steps: int) -> tuple[SettledConfig, bool | None]:
    """The config for the task, whose `data()` has an index from now on; and whether the stream is the same again.

    None: it is no stream, and nothing is held.
    """
    original: Any = task.data
    config, sizes = settled.config, settled.sizes

    def read() -> DataSource:
        collate = task.collate if task.defines("collate") else None
        return training_data_source(original(), collate, task.collate, config, sizes)

    def first(count: int, source: DataSource) -> list[Any]:
        return list(islice(seeded_samples(source.dataset, config.train.seed, 0), count))

    source = read()
    if not source.streams:
        return settled, None
    if source.settings.stream != "whole":
        raise ConfigError(
            f"data.stream: {source.settings.stream} gives each rank samples of its own, and verify needs the same ones "
            "in one process; verify with --set data.stream=whole"
        )
    if config.train.steps is None:
        raise ConfigError("train.epochs: verify holds a stream's first samples, whatever an epoch is; say train.steps")
    samples: Any = first(sizes.total * max(1, steps), source)
    loader: Any = DataLoader(
        samples, batch_size=1, collate_fn=source.collate, drop_last=source.settings.ragged == "drop"
    )
    vars(task)["data"] = lambda: loader
    count = min(len(samples), sizes.micro)
    again = fingerprint_batch(source.collate(samples[:count])) == fingerprint_batch(
        source.collate(first(count, read()))
    )
    said = config.data.model_dump(exclude_unset=True, exclude={"stream"})
    return replace(settled, config=config.changed({"data": Data(**said)})), again
