"""Damaged and forged checkpoints, many of each kind, at random; the seed repeats them."""

from __future__ import annotations

import random
import shutil
import time
from pathlib import Path

from tests.support.checkpoint_copies import Mutated
from tests.support.checkpoint_damage import DAMAGE
from tests.support.checkpoint_forgeries import FORGERIES
from tests.support.checkpoints import save_two_steps
from unipar.checkpoint.protocol.verifying import verify_checkpoint
from unipar.errors import CheckpointError

MUTATIONS = (*DAMAGE, *FORGERIES)


def play_mutations(folder: Path, rounds: int, seed: int) -> list[tuple[str, int, int, float]]:
    """Apply each mutation `rounds` times, each to a new copy; return rows of name, trials, refused and seconds.

    Raises whatever a reader raises that is not a CheckpointError. A mutation that was accepted is told by its row.
    """
    old, new = save_two_steps(folder / "whole")
    verify_checkpoint(old)
    verify_checkpoint(new)
    rows: list[tuple[str, int, int, float]] = []
    for mutation in MUTATIONS:
        refused, began = 0, time.perf_counter()
        for number in range(rounds):
            draw = random.Random(f"{seed} {mutation.__name__} {number}")
            trial = folder / "trial"
            copy = trial / new.name
            shutil.copytree(new, copy)
            mutation(Mutated(copy, old, draw))
            try:
                verify_checkpoint(copy, threads=1)
            except CheckpointError:
                refused += 1
            shutil.rmtree(trial)
        rows.append((mutation.__name__.lstrip("_"), rounds, refused, time.perf_counter() - began))
    return rows
