"""Checks, before a process starts, of what a run would go on from: nothing is written, and torch is not imported."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from unipar.checkpoint.protocol.verifying import find_checkpoints, inspect_checkpoint
from unipar.config import Config
from unipar.errors import CheckpointError, ConfigError
from unipar.run_folder.layout import checkpoint_folder, run_log_path
from unipar.run_folder.run_log import RunLog
from unipar.utils.address import Location, parse_location
from unipar.utils.files import relative_path


def configured_folder(run: Path, config: Config) -> Location:
    """Return the folder in which a run with this config keeps its checkpoints."""
    return checkpoint_folder(run, config.checkpoint.to if config.checkpoint else None)


def describe_finished_run(run: Path, config: Config) -> str:
    """Return a sentence if the run in this folder has ended after as many steps as the config wants, else ""."""
    end = next((row for row in RunLog.read(run_log_path(run, 0)) if row["event"] == "end"), None)
    if end is None:
        return ""
    steps, train = int(end["steps"]), config.train
    if train.steps is not None:
        done, key = steps >= train.steps, "steps"
    else:
        epochs = end.get("epochs")  # missing in run logs of older versions, and if steps were counted
        done, key = train.epochs is not None and epochs is not None and epochs >= train.epochs, "epochs"
        done = done and steps >= (end.get("of") or steps + 1)  # a loop of one's own may have ended early
    if not done:
        return ""
    return (
        f"{relative_path(run)} has done its {steps} steps, so nothing is left to do; to train longer, give it more "
        f"(--set train.{key}=...)"
    )


def refuse_lost_checkpoints(run: Path, config: Config) -> None:
    """Raise CheckpointError if the run saved elsewhere before, and newer checkpoints than are in the config's place."""
    before: Any = json.loads((run / "config.json").read_bytes()).get("checkpoint") or {}
    old, new = before.get("to"), config.checkpoint.to if config.checkpoint else None
    if old == new:
        return
    left, in_new = find_checkpoints(checkpoint_folder(run, old)), find_checkpoints(checkpoint_folder(run, new))
    if not left or (in_new and in_new[0].step >= left[0].step):
        return
    there = f"the newest is of step {in_new[0].step}" if in_new else "there is none"
    raise CheckpointError(
        f"{run} has its newest checkpoint in {left[0].path}, and checkpoint.to was {old or 'null'} and is "
        f"{new or 'null'}, where {there}: to go on, take the old value back (--set checkpoint.to={old or 'null'}), or "
        f"move the checkpoints to {checkpoint_folder(run, new)}; or begin a run with that one (--from {left[0].path})"
    )


def check_start(path: str, config: Config, given_keys: Collection[str], overwritten: Path | None) -> None:
    """Raise an error if a run cannot begin with the state of the checkpoint at this path or address.

    Hashes are left to the ranks. `given_keys`: keys of the config that were given for this run; `overwritten`: folder
    that is deleted first.
    """
    if config.model.loading is not None and any(f"{key}.".startswith("model.weights.") for key in given_keys):
        raise ConfigError(
            f"model.weights is given, and the run would begin with the weights of the checkpoint {path}: leave out "
            "model.weights, or the checkpoint (--from, resume)"
        )
    where = parse_location(path)
    if overwritten is not None and isinstance(where, Path) and where.resolve().is_relative_to(overwritten.resolve()):
        raise ConfigError(
            f"the checkpoint {path} is in {overwritten}, which --overwrite would delete: name another folder "
            "(out: ..., or --out DIR), or go on there with --resume"
        )
    done = inspect_checkpoint(where).manifest.step
    if config.train.steps is not None and done >= config.train.steps:
        raise CheckpointError(describe_nothing_left(path, done, config.train.steps))


def describe_nothing_left(path: Location | str, done: int, steps: int) -> str:
    """Return the sentence of an error: the checkpoint has done all the steps of the run."""
    return (
        f"checkpoint {path} has done {done} steps, and the run has {steps}: nothing is left to do; give it more (--set "
        "train.steps=...)"
    )
