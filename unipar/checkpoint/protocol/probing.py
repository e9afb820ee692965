"""Check of the folder for checkpoints before the first step: all ranks can write to it, and it is one folder."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, final

from unipar.checkpoint.format.names import TEMPORARY_PREFIX
from unipar.checkpoint.protocol.joint_attempts import attempt_together
from unipar.checkpoint.protocol.publication import refuse_full_disk
from unipar.checkpoint.storage.disk import Disk
from unipar.checkpoint.storage.remote import RemoteFolder
from unipar.distributed.meeting.text_rounds import Decide
from unipar.errors import CheckpointError
from unipar.utils.address import Address, Location

_PREFIX = f"{TEMPORARY_PREFIX}probe-"

PATIENCE = 5.0
"""Seconds in which a file must be seen on all machines: NFS keeps lists of names for some."""


def check_checkpoint_folder(
    folder: Location,
    needed: int,
    *,
    rank: int,
    decide: Decide,
    machine: str,
    disk: Disk | None = None,
    patience: float = PATIENCE,
) -> None:
    """Raise the same CheckpointError on all ranks unless checkpoints can be saved in a folder; all call it together.

    `needed`: bytes of this rank's part, as far as is known; `machine`: name of the machine that it is on.
    """
    probe = _Probe(folder, rank, decide, machine, disk or Disk(), patience)
    try:
        (first, *_) = probe.agree(lambda: needed, summarise=lambda all_needed: probe.begin(sum(all_needed)))
        probe.agree(lambda: probe.look(*first))
    finally:
        if rank == 0:
            probe.end()


@final
class _Probe:
    """One check on one rank."""

    def __init__(self, folder: Location, rank: int, decide: Decide, machine: str, disk: Disk, patience: float) -> None:
        self.folder, self.rank, self.decide, self.machine = folder, rank, decide, machine
        self.disk, self.patience = disk, patience
        self.name = ""

    def agree(self, attempt: Callable[[], Any], summarise: Callable[[list[Any]], Any] | None = None) -> list[Any]:
        """Return what an attempt returned on each rank, or what `summarise` makes of it on rank 0, once all "
        "succeeded."""
        results = self._round(attempt)
        return results if summarise is None else self._round(lambda: summarise(results) if self.rank == 0 else None)

    def _round(self, attempt: Callable[[], Any]) -> list[Any]:
        return attempt_together(
            self.decide, attempt, lambda failure, _: f"no checkpoint can be saved in {self.folder}: {failure}"
        )

    def begin(self, needed: int) -> tuple[str, str]:
        """Make the folder and write a file for the other ranks; return its name, and that of this machine."""
        self.name = f"{_PREFIX}{secrets.token_hex(4)}"
        if isinstance(self.folder, Address):
            files = RemoteFolder(self.folder)
            files.delete([name for name in files.names() if name.startswith(_PREFIX)])
            files.write(self.name, b"")
        else:
            self.disk.make_parents(self.folder)
            for left in self.folder.glob(f"{_PREFIX}*"):  # of a process that was killed here
                left.unlink(missing_ok=True)
            refuse_full_disk(needed, self.disk.free_bytes(self.folder))
            self._create(self.folder / self.name)
        return self.name, self.machine

    def _create(self, path: Path) -> None:
        with self.disk.create(path) as file:
            file.flush()

    def look(self, name: str, machine: str) -> None:
        """Raise CheckpointError unless rank 0's file is there, and this rank may write beside it."""
        if isinstance(self.folder, Address):
            if not RemoteFolder(self.folder).has(name):
                raise CheckpointError(
                    f"what rank 0 wrote to {self.folder / name} is not there for this rank: give all ranks the same "
                    "checkpoint.to"
                )
            return
        until = time.monotonic() + self.patience
        while not (self.folder / name).exists():
            if time.monotonic() > until:
                where = f"on {self.machine}" if self.machine != machine else f"on {machine} as well"
                raise CheckpointError(
                    f"it is {where}, and does not see there what rank 0 wrote on {machine}: name a folder in "
                    "checkpoint.to that all ranks share, or an address such as s3://bucket/path"
                )
            with suppress(OSError):
                os.listdir(self.folder)  # NFS looks again
            time.sleep(0.05)
        if self.rank:
            path = self.folder / f"{name}-{self.rank}"
            try:
                self._create(path)
            finally:
                path.unlink(missing_ok=True)

    def end(self) -> None:
        """Delete rank 0's file; one that stays is deleted by the next check."""
        if not self.name:
            return
        with suppress(OSError, CheckpointError):
            if isinstance(self.folder, Address):
                RemoteFolder(self.folder).delete([self.name])
            else:
                (self.folder / self.name).unlink(missing_ok=True)
