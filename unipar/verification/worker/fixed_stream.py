"""A stream's first samples, read once and held: every cell, rank and replay takes its own from the same ones."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader

from unipar.config.config import Data
from unipar.config.settled import SettledConfig
from unipar.data.dataset import Source, training_source
from unipar.data.stream import sown
from unipar.errors import ConfigError
from unipar.task import Task
from unipar.training.fingerprint import fingerprint


def held(task: Task, settled: SettledConfig, steps: int) -> tuple[SettledConfig, bool | None]:
    """The config for the task, whose `data()` has an index from now on; and whether the stream is the same again.

    None: it is no stream, and nothing is held.
    """
    original: Any = task.data
    config, sizes = settled.config, settled.sizes

    def read() -> Source:
        collate = task.collate if task.gives("collate") else None
        return training_source(original(), collate, task.collate, config, sizes)

    def first(count: int, source: Source) -> list[Any]:
        return list(islice(sown(source.dataset, config.train.seed, 0), count))

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
    again = fingerprint(source.collate(samples[:count])) == fingerprint(source.collate(first(count, read())))
    said = config.data.model_dump(exclude_unset=True, exclude={"stream"})
    return replace(settled, config=config.changed({"data": Data(**said)})), again
