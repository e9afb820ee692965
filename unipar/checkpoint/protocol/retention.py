"""Which checkpoints stay: deletion of old ones, and of what writers left that died."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from unipar.checkpoint.format.names import TEMPORARY_PREFIX, TRASH_PREFIX, is_frozen_folder, step_folder_name
from unipar.checkpoint.protocol.verifying import (
    CheckpointFolder,
    find_checkpoints,
    inspect_checkpoint,
    list_names,
    read_manifest,
)
from unipar.checkpoint.storage.disk import Disk, lock_is_free
from unipar.errors import CheckpointError
from unipar.utils.address import Location

ABANDONED_SECONDS = 24 * 3600
"""Age of a temporary folder that is deleted on a file system whose locks do not tell whether its writer lives."""

_TEMPORARY = re.compile(rf"{re.escape(TEMPORARY_PREFIX)}step-\d+-[0-9a-f]+\Z")
_TRASH = re.compile(rf"{re.escape(TRASH_PREFIX)}step-\d+-[0-9a-f]+\Z")


@dataclass(frozen=True)
class Retention:
    """Checkpoints that stay: the `keep` newest whole ones, and the steps in `protected` (the best, for example)."""

    keep: int = 3
    protected: Collection[int] = ()

    def __post_init__(self) -> None:
        if self.keep < 1:
            raise ValueError(f"keep is {self.keep}; at least one checkpoint must stay")


def temporary_name(step: int) -> str:
    """Return a new name for the folder in which a checkpoint is written."""
    return f"{TEMPORARY_PREFIX}{step_folder_name(step)}-{secrets.token_hex(4)}"


def trash_name(step: int) -> str:
    """Return a new name for a checkpoint that is going to be deleted."""
    return f"{TRASH_PREFIX}{step_folder_name(step)}-{secrets.token_hex(4)}"


def sweep_abandoned(disk: Disk, folder: Path) -> list[str]:
    """Delete temporary folders whose writer is dead, and trash; return a sentence for each that cannot be deleted."""
    remarks: list[str] = []
    for path in sorted(folder.iterdir()):
        if _TRASH.match(path.name) or (_TEMPORARY.match(path.name) and is_abandoned(path)):
            try:
                disk.remove_tree(path)
            except OSError as e:  # as on NFS while another process has one of its files open
                remarks.append(f"{path}: left by an earlier save, and cannot be deleted ({e.strerror})")
    return remarks


def is_abandoned(path: Path) -> bool:
    """Return whether the writer of a temporary folder is dead."""
    free = lock_is_free(path)
    if free is not None:
        return free
    try:
        return time.time() - path.lstat().st_mtime > ABANDONED_SECONDS
    except OSError:
        return False


def remove_old_checkpoints(
    folder: Location, retention: Retention, current: int, delete: Callable[[CheckpointFolder], None]
) -> tuple[list[int], list[str]]:
    """Delete checkpoints that need not stay; return their steps, and sentences about what did not go as it should.

    Nothing is deleted unless the current one, which was just published, is whole. Broken ones do not count as kept.
    """
    removed: list[int] = []
    remarks: list[str] = []
    kept = 0
    for checkpoint in find_checkpoints(folder):
        if kept < retention.keep or checkpoint.step == current:
            try:
                inspect_checkpoint(checkpoint.path)
                kept += 1
            except CheckpointError as e:
                remarks.append(f"{e}; it does not count as kept")
                if checkpoint.step == current:
                    return removed, [*remarks, "no older checkpoint was deleted"]
        elif checkpoint.step not in retention.protected:
            try:
                delete(checkpoint)
                removed.append(checkpoint.step)
            except CheckpointError as e:
                remarks.append(str(e))
            except OSError as e:
                remarks.append(f"{checkpoint.path}: cannot be deleted ({e.strerror})")
    return removed, remarks


def list_unused_frozen_folders(folder: Location, used: Collection[str]) -> list[str]:
    """Return the names of folders with weights that are not trained, of which no checkpoint has a file.

    `used`: names known to be in use. None is unused if it cannot be told what a checkpoint has.
    """
    names = {name for name in list_names(folder) if is_frozen_folder(name)} - {*used}
    try:
        for checkpoint in find_checkpoints(folder) if names else ():
            names -= read_manifest(checkpoint.path).folders_beside
    except CheckpointError:
        return []
    return sorted(names)
