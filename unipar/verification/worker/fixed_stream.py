"""First samples of a stream, read once and kept, so that every strategy, rank and replay uses the same samples."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader

from unipar.config.config import Data
from unipar.config.settled import SettledConfig
from unipar.data.dataset import DataSource, training_data_source
from unipar.data.stream_reader import seeded_samples
from unipar.engines.fingerprint import fingerprint_batch
from unipar.errors import ConfigError
from unipar.task import Task


def fix_stream_samples(task: Task, settled: SettledConfig, steps: int) -> tuple[SettledConfig, bool | None]:
    """Replace a stream in the task by its first samples; return its config and whether a second read is the same.

    The second value is None if the data is not a stream; the task is then unchanged.
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
        raise ConfigError(
            "train.epochs: verify uses the first samples of a stream and does not know its epochs; set train.steps"
        )
    samples: Any = first(sizes.total * max(1, steps), source)
    loader: Any = DataLoader(
        samples, batch_size=1, collate_fn=source.collate, drop_last=source.settings.last_batch == "drop"
    )
    vars(task)["data"] = lambda: loader
    count = min(len(samples), sizes.micro)
    again = fingerprint_batch(source.collate(samples[:count])) == fingerprint_batch(
        source.collate(first(count, read()))
    )
    kept_keys = config.data.model_dump(exclude_unset=True, exclude={"stream"})
    return replace(settled, config=config.changed({"data": Data(**kept_keys)})), again
