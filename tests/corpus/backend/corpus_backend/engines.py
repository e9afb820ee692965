"""The engine of each case, by name."""

from __future__ import annotations

from collections.abc import Callable

from corpus_backend import gradients, inputs, updates
from corpus_backend.healthy import HealthyDDP
from unipar.backend import Engine, Part
from unipar.config import Config
from unipar.distributed.world import World

ENGINES: dict[str, Callable[[Part, Config, World], Engine]] = {
    "none": HealthyDDP,
    "divided-again": gradients.DividedAgain,
    "times-accumulation": gradients.TimesAccumulation,
    "averaged-again": gradients.AveragedAgain,
    "discarded": gradients.Discarded,
    "not-zeroed": gradients.NotZeroed,
    "same-samples": inputs.SameSamples,
    "split-twice": inputs.SplitTwice,
    "same-order": inputs.SameOrder,
    "bf16-table": inputs.Bf16Table,
    "rate-ahead": updates.rate_ahead,
    "old-parameters": updates.OldParameters,
    "some-old-parameters": updates.SomeOldParameters,
}


def build_case(name: str, part: Part, config: Config, world: World) -> Engine:
    """Return the engine of a case."""
    return ENGINES[name](part, config, world)
