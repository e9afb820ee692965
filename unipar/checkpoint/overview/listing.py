"""List of the checkpoints of a run or of a folder, whole or broken."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unipar.checkpoint.protocol.verifying import (
    CheckpointContents,
    find_checkpoints,
    inspect_checkpoint,
    list_names,
)
from unipar.errors import CheckpointError
from unipar.run_folder.layout import checkpoint_folder
from unipar.utils.address import Address, Location
from unipar.utils.table import format_table
from unipar.utils.text import first_few, format_age, format_size

_MOST_RUNS = 20
"""Folders that are looked into, to name those with checkpoints."""


@dataclass(frozen=True, kw_only=True)
class ListedCheckpoint:
    """Checkpoint in short; of a broken one nothing but step, path and reason is known."""

    step: int
    path: str
    whole: bool
    why: str = ""
    """Sentence on what is wrong with it."""

    time: float | None = None
    """Time of the save, in seconds since 1970."""

    bytes: int = 0
    strategy: str = ""
    ranks: int | None = None
    metrics: Mapping[str, float | None] | None = None
    """Results of the last evaluation before the save."""

    evaluated: int | None = None
    """Step of that evaluation; None if it is not known."""

    best: bool = False
    """Whether it is among the best, as the newest whole checkpoint of the folder counts them."""


def folder_with_checkpoints(location: Location) -> Location:
    """Return the folder in which the checkpoints of a run folder, or of a folder itself, are."""
    folders = [location, location / "checkpoints"]
    if isinstance(location, Path) and (elsewhere := _folder_of_run(location)) is not None:
        folders.append(elsewhere)
    for folder in folders:
        if find_checkpoints(folder):
            return folder
    if isinstance(location, Path) and not location.is_dir():
        raise CheckpointError(f"{location}: no such folder; name a run folder, or a folder with checkpoints")
    if inside := first_few([f"{location / name}" for name in _runs_in(location)]):
        raise CheckpointError(f"{location} has checkpoints of several runs; name one: {inside}")
    if isinstance(location, Address):
        raise CheckpointError(f"{location} has no checkpoints: there is no folder such as step-00000500 in it")
    raise CheckpointError(
        f"{location} has no checkpoints: there is no folder such as step-00000500 in it, nor in its folder "
        "checkpoints; "
        "if the run saves elsewhere, name its folder in checkpoint.to"
    )


def _runs_in(folder: Location) -> list[str]:
    """Return the names of folders in a folder that have checkpoints, as below `checkpoint.to`."""
    names = list_names(folder)[:_MOST_RUNS]
    return [name for name in names if find_checkpoints(folder / name)]


def _folder_of_run(run: Path) -> Location | None:
    """Return where the checkpoints of a run folder are if its config names another place."""
    try:
        config: Any = json.loads((run / "config.json").read_bytes())
        return checkpoint_folder(run, config["checkpoint"]["to"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def list_checkpoints(location: Location) -> list[ListedCheckpoint]:
    """Return the checkpoints of a folder, newest first; all about them is checked but the hashes of their tensors."""
    best: set[int] | None = None
    listed: list[ListedCheckpoint] = []
    for checkpoint in find_checkpoints(folder_with_checkpoints(location)):
        try:
            contents = inspect_checkpoint(checkpoint.path)
        except CheckpointError as e:
            listed.append(ListedCheckpoint(step=checkpoint.step, path=str(checkpoint.path), whole=False, why=str(e)))
            continue
        if best is None:
            best = {pair[0] for pair in contents.state.get("best") or ()}
        listed.append(_listed(contents, checkpoint.step in best))
    return listed


def _listed(contents: CheckpointContents, best: bool) -> ListedCheckpoint:
    state: dict[str, Any] = contents.state
    return ListedCheckpoint(
        step=contents.manifest.step,
        path=str(contents.path),
        whole=True,
        time=state.get("time"),
        bytes=contents.manifest.bytes,
        strategy=state.get("strategy") or "",
        ranks=state.get("ranks"),
        metrics=state.get("metrics") or {},
        evaluated=state.get("evaluated"),
        best=best,
    )


def checkpoint_table(listed: list[ListedCheckpoint], width: int, now: float | None = None) -> str:
    """Return the list as a table in plain text."""
    now = time.time() if now is None else now
    rows = [
        [
            str(one.step),
            format_age(now - one.time) if one.time else "-",
            format_size(one.bytes),
            one.strategy or "-",
            str(one.ranks or "-"),
            "yes" if one.best else "",
            format_metrics(one.metrics or {}, one.evaluated if one.evaluated != one.step else None),
        ]
        if one.whole
        else [str(one.step), f"broken: {one.why}"]
        for one in listed
    ]
    header = ["step", "age", "size", "saved by", "ranks", "best", "metrics"]
    return format_table(header, rows, right=(0, 1, 2, 4), width=width)


def format_metrics(metrics: Mapping[str, float | None], step: int | None = None) -> str:
    """Return metrics in one line: `loss 0.25, accuracy 0.9`; `step`: that of an evaluation before the save."""
    values = (f"{name} {'not finite' if value is None else f'{value:.6g}'}" for name, value in metrics.items())
    return ", ".join(values) + (f" (of step {step:,})" if metrics and step is not None else "")
