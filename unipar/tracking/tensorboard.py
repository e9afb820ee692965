"""Tracker for TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast, final

from typing_extensions import override

from unipar.tracking.png import png_size
from unipar.tracking.tracker import Tracker
from unipar.utils.mappings import flatten


@final
class TensorBoard(Tracker):
    """Tracker that writes TensorBoard event files to RUN/tensorboard."""

    requires = ("tensorboard",)

    @override
    def __init__(self, run: Path, config: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        self._folder, self._library = str(run / "tensorboard"), SummaryWriter
        # four spaces: a Markdown code block
        self._config = "\n".join(f"    {key}: {value}" for key, value in flatten(config))
        self._writer: Any = self._open(None)

    def _open(self, after: int | None) -> Any:
        # a short interval, because a run that ends in an error may lose what is not flushed
        purge = None if after is None else after + 1
        writer = self._library(self._folder, purge_step=purge, flush_secs=10)
        writer.add_text("config", self._config, after)
        return writer

    @override
    def go_on(self, step: int) -> None:
        """Have TensorBoard forget what earlier attempts wrote of later steps."""
        self._writer.close()
        self._writer = self._open(step)

    @override
    def write(self, step: int, named: Mapping[str, float]) -> None:
        for name, value in named.items():
            self._writer.add_scalar(name, value, step)

    @override
    def write_image(self, step: int, name: str, file: Path) -> None:
        from tensorboard.compat.proto import summary_pb2

        png, made = file.read_bytes(), cast(Any, summary_pb2).Summary
        width, height = png_size(png)
        image = made.Image(height=height, width=width, colorspace=3, encoded_image_string=png)
        self._writer.file_writer.add_summary(made(value=[made.Value(tag=name, image=image)]), step)

    @override
    def close(self) -> None:
        self._writer.close()
