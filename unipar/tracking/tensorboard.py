"""Tracker for TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from typing_extensions import override

from unipar.tracking.tracker import Tracker
from unipar.utils.mappings import flatten


@final
class TensorBoard(Tracker):
    """Tracker that writes TensorBoard event files to RUN/tensorboard."""

    requires = ("tensorboard",)

    @override
    def __init__(self, run: Path, config: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        # a short interval, because a run that ends in an error may lose what is not flushed
        self._writer: Any = SummaryWriter(str(run / "tensorboard"), flush_secs=10)
        rows = "\n".join(f"    {key}: {value}" for key, value in flatten(config))  # four spaces: a Markdown code block
        self._writer.add_text("config", rows)

    @override
    def write(self, step: int, named: Mapping[str, float]) -> None:
        for name, value in named.items():
            self._writer.add_scalar(name, value, step)

    @override
    def close(self) -> None:
        self._writer.close()
