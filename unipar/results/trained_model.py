"""Trained model of a run on one process: its task's model with the values of its newest checkpoint."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unipar.backend.engine import KIND_OF_AVERAGES
from unipar.checkpoint.protocol.verifying import (
    CheckpointContents,
    find_checkpoints,
    inspect_checkpoint,
    verify_checkpoint,
)
from unipar.config.settled import read_settled
from unipar.errors import CheckpointError, TaskError
from unipar.run_folder.layout import checkpoint_folder, read_launch_file

if TYPE_CHECKING:
    from torch import nn

    from unipar.checkpoint.saved_state import SavedState
    from unipar.task import Task
    from unipar.utils.address import Location


def newest_whole_checkpoint(
    run: Path, check: Callable[[Location], CheckpointContents] = inspect_checkpoint
) -> CheckpointContents | None:
    """Return the newest checkpoint of a run that passes `check`, which computes no hashes here; None if none does."""
    config: Any = json.loads((run / "config.json").read_bytes()) if (run / "config.json").exists() else {}
    for checkpoint in find_checkpoints(checkpoint_folder(run, (config.get("checkpoint") or {}).get("to"))):
        with suppress(CheckpointError):
            return check(checkpoint.path)
    return None


def import_task_of_run(run: Path) -> Task:
    """Return the task of a run as its ranks have loaded it; raise TaskError if its code is in no file."""
    from unipar.task.reference import TaskRef

    launched, argv = read_launch_file(run).get("task"), sys.argv
    if launched is None or launched["carried"]:
        where = "a script that calls join()" if launched is None else "a prompt, a notebook or a -c command"
        raise TaskError(
            f"the code of {run} is in {where}, from which its model cannot be made here: `unipar checkpoint export` "
            "writes its weights into a file that your own model loads"
        )
    try:
        return TaskRef.from_json(launched).load()
    finally:
        sys.argv = argv


def load_model(run: Path, make_task: Callable[[], Task], part: str | None, *, averages: bool) -> nn.Module:
    """Return the model, or a part of it, on the CPU and in evaluation mode, with the values of the newest checkpoint.

    `averages`: those of `train.ema` in place of the weights that have one.
    """
    import torch

    from unipar.checkpoint.saved_state import SavedState
    from unipar.model.create import combine_parts, create_on_cpu

    checkpoint = newest_whole_checkpoint(run, verify_checkpoint)
    if checkpoint is None:
        raise CheckpointError(
            f"{run} has saved no checkpoint, so there is no trained model to load: give the config a section "
            "checkpoint (`checkpoint: {}` saves at the end) and train again"
        )
    with torch.random.fork_rng(devices=[]):
        parts = create_on_cpu(make_task().model, read_settled(run).config)
    if part is not None and part not in parts:
        raise TaskError(f"load({part!r}): model() returned no part of that name; it has {', '.join(parts)}")
    model = combine_parts(parts)
    with SavedState(checkpoint.path, checkpoint.manifest) as state, torch.no_grad():
        _fill_model(model, state, averages=averages)
    return (model if part is None else parts[part]).eval()


def _fill_model(model: nn.Module, state: SavedState, *, averages: bool) -> None:
    from unipar.checkpoint.saved_state import refuse_other_model
    from unipar.checkpoint.tensor_bytes import dtype_name

    tensors = {(name, "weight"): p.data for name, p in model.named_parameters()}
    tensors |= {(name, "buffer"): b for name, b in model.named_buffers()}
    saved = {key: stored for key, stored in state.tensors.items() if key[1] in ("weight", "buffer")}
    wanted = {key: (t.shape, dtype_name(t, key[0])) for key, t in tensors.items()}
    refuse_other_model(wanted, saved, f"checkpoint {state.folder}")
    if averages and not any(kind == KIND_OF_AVERAGES for _, kind in state.tensors):
        raise CheckpointError(f"checkpoint {state.folder} has no averages: give the config train.ema and train again")
    for (name, kind), tensor in tensors.items():
        average = averages and kind == "weight" and state.has(name, KIND_OF_AVERAGES)
        tensor.copy_(state.whole(name, KIND_OF_AVERAGES if average else kind))
