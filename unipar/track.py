"""Where metrics go besides the run folder: TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, final

from unipar.errors import BackendNotInstalled


@final
class Trackers:
    """Written by rank 0 alone; empty elsewhere."""

    def __init__(self, to: tuple[str, ...], run: Path, rank: int) -> None:
        self._writers: list[Any] = []
        if rank == 0 and "tensorboard" in to:
            require("tensorboard")
            from torch.utils.tensorboard.writer import SummaryWriter

            self._writers.append(SummaryWriter(str(run / "tensorboard")))

    def write(self, step: int, named: Mapping[str, float]) -> None:
        for writer in self._writers:
            for name, value in named.items():
                writer.add_scalar(name, value, step)

    def close(self) -> None:
        for writer in self._writers:
            writer.close()
        self._writers = []


def require(tracker: str) -> None:
    if find_spec(tracker) is None:
        raise BackendNotInstalled(f"log.to: {tracker} is not installed here: pip install 'unipar[{tracker}]'")
