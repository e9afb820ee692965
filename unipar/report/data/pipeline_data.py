"""Pipelines of runs and strategies, read from their configs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic import ValidationError

from unipar.config import Strategy
from unipar.config.sections.batch import Batch
from unipar.config.sections.strategy import Axes
from unipar.errors import ConfigError


class PipelineFacts(NamedTuple):
    """A pipeline, and the number of microbatches that each stage runs in a step."""

    axes: Axes
    micros: int


def read_pipeline(strategy: str, config: Mapping[str, Any]) -> PipelineFacts | None:
    """Return the pipeline of a strategy that ran with this config (by dotted key), or None if none is clear."""
    try:
        axes = Strategy.parse(strategy).axes
        if axes.pipeline == 1:
            return None
        batch = Batch.model_validate({key: config.get(f"batch.{key}") for key in ("total", "micro", "accumulate")})
        return PipelineFacts(axes, batch.settle(int(config["parallel.data"])).accumulate)
    except (ConfigError, ValidationError, LookupError, TypeError, ValueError):  # a folder that was written by hand
        return None
