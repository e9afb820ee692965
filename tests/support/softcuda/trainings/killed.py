"""A character GPT one of whose ranks is killed in the middle of a run, once."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch.distributed as dist
from typing_extensions import override

from examples.char_gpt import CharGPT
from unipar.task import Run

STEP = 4
"""Steps that are done when rank 1 is killed."""


class KilledOnce(CharGPT):
    """Rank 1 is killed if the file `killed` is not there yet; afterwards it is."""

    def __init__(self, killed: str, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.killed = Path(killed)

    @override
    def train(self, run: Run) -> None:
        for share in run.batches():
            if run.done == STEP and dist.get_rank() == 1 and not self.killed.exists():
                self.killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            run.step(share)
