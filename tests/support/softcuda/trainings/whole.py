"""A character GPT that takes the whole model on every rank when it has trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from typing_extensions import override

from examples.char_gpt import CharGPT
from unipar.task import Run


class WholeGPT(CharGPT):
    """Writes the sum of all weights, and where they are, to the folder `told`."""

    def __init__(self, told: str, **sizes: Any) -> None:
        super().__init__(**sizes)
        self._told = Path(told)

    @override
    def train(self, run: Run) -> None:
        for local_batch in run.batches():
            run.step(local_batch)
        with run.whole() as model:
            weights = list(model.parameters())
            total = sum(float(p.double().sum()) for p in weights)
            (self._told / f"{run.rank}").write_text(f"{total:.6f} {weights[0].device.type}", "utf-8")
