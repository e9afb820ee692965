"""A character GPT one of whose ranks is killed in the middle of a run, once."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from typing_extensions import override

from examples.char_gpt import CharGPT
from unipar.task import Run

STEP = 4
"""Steps that are done when rank 1 is killed."""

PATIENCE = 60.0
"""Seconds in which a checkpoint is published while rank 1 waits, and with it all ranks."""


class KilledOnce(CharGPT):
    """Rank 1 is killed if the file `killed` is not there yet, once the checkpoint `saved` is; afterwards both are."""

    def __init__(self, killed: str, saved: str, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.killed, self.saved = Path(killed), Path(saved)

    @override
    def train(self, run: Run) -> None:
        for local_batch in run.batches():
            if run.done == STEP and dist.get_rank() == 1 and not self.killed.exists():
                wait_until_there(self.saved)
                self.killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            run.step(local_batch)


def wait_until_there(path: Path) -> None:
    """Wait for a path that another thread makes."""
    until = time.monotonic() + PATIENCE
    while not path.exists():
        assert time.monotonic() < until, f"no {path.name} in {path.parent}"
        time.sleep(0.01)
