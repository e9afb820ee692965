"""Publication of a checkpoint: from its first file to the moment when readers see it, on a disk and at an address."""

from __future__ import annotations

import stat
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from contextlib import ExitStack, suppress
from os import path as os_path
from pathlib import Path
from typing import Generic, TypeVar, final

from typing_extensions import override

from unipar.checkpoint.format.manifest import FileRecord
from unipar.checkpoint.format.names import SEAL_FILE, SHARD_FOLDER, is_beside, step_folder_name
from unipar.checkpoint.protocol.remote_steps import delete_remote_checkpoint, list_remote_steps
from unipar.checkpoint.protocol.retention import (
    list_unused_frozen_folders,
    sweep_abandoned,
    temporary_name,
    trash_name,
)
from unipar.checkpoint.protocol.verifying import CheckpointFolder, verify_checkpoint
from unipar.checkpoint.storage.disk import Disk, OutputFile
from unipar.checkpoint.storage.remote import RemoteFolder
from unipar.errors import CheckpointError
from unipar.utils.address import Address, Location
from unipar.utils.text import format_size

_Where = TypeVar("_Where", Path, Address)


class Publication(ABC, Generic[_Where]):
    """One checkpoint on its way; rank 0 begins, publishes and deletes, and all ranks create files."""

    def __init__(self, folder: _Where, step: int, beside: str) -> None:
        """`beside`: name of a new folder for weights that are not trained; "": this checkpoint writes none."""
        self.folder, self.step, self.beside = folder, step, beside
        self.outcome = "it is not published"
        """Words on what a failure leaves, as far as is known."""

        self.published = False
        self.remarks: list[str] = []

    @property
    def target(self) -> Location:
        """Folder of the checkpoint once it is published."""
        return self.folder / step_folder_name(self.step)

    @abstractmethod
    def begin(self, needed: int) -> str:
        """Make room for this many bytes; return what `join` needs on all ranks. Rank 0 calls this."""

    @abstractmethod
    def join(self, name: str) -> None:
        """Write to what rank 0 has begun."""

    @abstractmethod
    def create(self, name: str) -> OutputFile:
        """Open a new file of the checkpoint for writing."""

    @abstractmethod
    def flush_shards(self) -> None:
        """Return when the entries of this rank's shards are on the device."""

    @abstractmethod
    def check_written(self, files: Mapping[str, FileRecord]) -> None:
        """Raise CheckpointError if the files of all ranks are not there; rank 0 calls this before the seal."""

    @abstractmethod
    def publish(self) -> None:
        """Let readers see the checkpoint: all its files are written, the seal's last."""

    def remove_unused_beside(self, used: Collection[str]) -> None:
        """Delete folders with weights that are not trained, of which no checkpoint has a file. Rank 0 calls this."""
        for name in list_unused_frozen_folders(self.folder, used):
            try:
                self.delete_beside(name)
            except (CheckpointError, OSError) as e:
                self.remarks.append(f"{self.folder / name}: no checkpoint needs it, and it cannot be deleted ({e})")

    @abstractmethod
    def delete_beside(self, name: str) -> None:
        """Delete a folder beside the checkpoints."""

    @abstractmethod
    def delete(self, checkpoint: CheckpointFolder) -> None:
        """Delete a checkpoint so that half a deletion is none; raise OSError or CheckpointError if that fails."""

    def remove_replaced(self) -> None:
        """Delete what had this step's name before."""

    def withdraw(self) -> None:
        """Undo what can be undone once the seal could not be written."""

    @abstractmethod
    def abandon(self) -> None:
        """Delete what was written, after a failure; what stays is deleted by the next save. Rank 0 calls this."""

    def close(self) -> None:
        """Free what is held while a checkpoint is written."""


@final
class DiskPublication(Publication[Path]):
    """Temporary folder on the same file system, which one rename publishes."""

    def __init__(self, folder: Path, step: int, disk: Disk, beside: str) -> None:
        super().__init__(folder, step, beside)
        self._disk, self._lock = disk, ExitStack()
        self._begun: Path | None = None

    @property
    def _temporary(self) -> Path:
        assert self._begun is not None
        return self._begun

    @override
    def begin(self, needed: int) -> str:
        self._disk.make_parents(self.folder)
        self.remarks += sweep_abandoned(self._disk, self.folder)
        refuse_full_disk(needed, self._disk.free_bytes(self.folder))
        self._begun = self.folder / temporary_name(self.step)
        self._disk.make_folder(self._begun, 0o700)
        self._lock.enter_context(self._disk.lock(self._begun))
        self._disk.make_folder(self._begun / SHARD_FOLDER)
        if self.beside:
            self._disk.make_folder(self.folder / self.beside)
        return self._begun.name

    @override
    def join(self, name: str) -> None:
        self._begun = self.folder / name

    @override
    def create(self, name: str) -> OutputFile:
        return self._disk.create((self.folder if is_beside(name) else self._temporary) / name)

    @override
    def flush_shards(self) -> None:
        self._disk.flush_folder(self._temporary / SHARD_FOLDER)
        if self.beside:
            self._disk.flush_folder(self.folder / self.beside)

    @override
    def check_written(self, files: Mapping[str, FileRecord]) -> None:
        """Do nothing: each rank's flush has returned."""

    @override
    def publish(self) -> None:
        self.flush_shards()
        if self.beside:
            self._disk.flush_folder(self.folder)  # no checkpoint is there without the folder that it names
        self._disk.change_mode(self._temporary, stat.S_IMODE(self.folder.stat().st_mode) & 0o777)
        self._disk.flush_folder(self._temporary)
        self._put_in_place(self._temporary, self.folder / step_folder_name(self.step))
        self.published, self.outcome = True, "it is published, but a power failure may undo that"
        self._disk.flush_folder(self.folder)

    def _put_in_place(self, temporary: Path, target: Path) -> None:
        """Give the folder its name; a checkpoint of the same step that is there gets the temporary name for it."""
        if not os_path.lexists(target):
            self._disk.rename(temporary, target)
        elif not self._disk.exchange(temporary, target):
            self._disk.rename(target, self.folder / trash_name(self.step))
            self._disk.rename(temporary, target)

    @override
    def delete(self, checkpoint: CheckpointFolder) -> None:
        trash = self.folder / trash_name(checkpoint.step)
        self._disk.rename(self.folder / checkpoint.path.name, trash)
        self._disk.remove_tree(trash)

    @override
    def delete_beside(self, name: str) -> None:
        self._disk.remove_tree(self.folder / name)

    @override
    def remove_replaced(self) -> None:
        with suppress(OSError):  # what stays is swept by the next save
            self._disk.remove_tree(self._temporary)

    @override
    def abandon(self) -> None:
        if self._begun is not None and not self.published:
            with suppress(OSError):
                self._disk.remove_tree(self._begun)
            with suppress(OSError):
                if self.beside:
                    self.delete_beside(self.beside)

    @override
    def close(self) -> None:
        self._lock.close()


def refuse_full_disk(needed: int, free: int) -> None:
    """Raise CheckpointError if a checkpoint needs more bytes than are free."""
    if needed > free:
        raise CheckpointError(
            f"it needs {format_size(needed)} and {format_size(free)} are free: free some space, keep fewer "
            "checkpoints, or save elsewhere"
        )


@final
class RemotePublication(Publication[Address]):
    """Files at an address, where nothing is renamed: manifest.sha256 is written last, and publishes all."""

    def __init__(self, folder: Address, step: int, beside: str) -> None:
        super().__init__(folder, step, beside)
        self._files = RemoteFolder(folder / step_folder_name(step))
        self._begun = False

    @override
    def begin(self, needed: int) -> str:
        parent = RemoteFolder(self.folder)
        parent.abort_uploads()
        for name in list_remote_steps(self.folder)[1]:  # their writers died; a run has no second writer
            try:
                delete_remote_checkpoint(self.folder / name)
            except CheckpointError as e:
                self.remarks.append(f"{e}; it is left by an earlier save")
        if self._files.has(SEAL_FILE):
            self._remove_broken()
        self._begun = True
        return ""

    def _remove_broken(self) -> None:
        """Delete a broken checkpoint of this step; raise CheckpointError if it is whole: two cannot swap names here."""
        try:
            verify_checkpoint(self.target)
        except CheckpointError as e:
            self.remarks.append(f"{e}; it is replaced")
            delete_remote_checkpoint(self._files.address)
            return
        raise CheckpointError(
            f"{self.target} is there already and is whole, and at an address no checkpoint is replaced: delete it, or "
            "save elsewhere"
        )

    @override
    def join(self, name: str) -> None:
        """Do nothing: the address is known."""

    @override
    def create(self, name: str) -> OutputFile:
        return (RemoteFolder(self.folder) if is_beside(name) else self._files).create(name)

    @override
    def flush_shards(self) -> None:
        """Do nothing: a file that is written is stored."""

    @override
    def check_written(self, files: Mapping[str, FileRecord]) -> None:
        actual_sizes = self._files.sizes()
        if self.beside:
            beside = RemoteFolder(self.folder / self.beside).sizes()
            actual_sizes |= {f"{self.beside}/{name}": size for name, size in beside.items()}
        wanted = {name: record.bytes for name, record in files.items()}
        if actual_sizes != wanted:
            name = min(actual_sizes.items() ^ wanted.items())[0]
            there, written = (f"{sizes.get(name, 0):,} bytes" for sizes in (actual_sizes, wanted))
            path = (self.folder if is_beside(name) else self._files.address) / name
            raise CheckpointError(
                f"{path}: {there} are there, and {written} were written: another run may save to the same address"
            )
        self.outcome = "whether it is published is not known"

    @override
    def publish(self) -> None:
        self.published = True

    @override
    def delete(self, checkpoint: CheckpointFolder) -> None:
        delete_remote_checkpoint(self.folder / checkpoint.path.name)

    @override
    def delete_beside(self, name: str) -> None:
        delete_remote_checkpoint(self.folder / name)

    @override
    def withdraw(self) -> None:
        self.abandon()

    @override
    def abandon(self) -> None:
        if self._begun and not self.published:
            with suppress(CheckpointError):
                self._files.abort_uploads()
                delete_remote_checkpoint(self._files.address)
                self.outcome = "it is not published"
                if self.beside:
                    self.delete_beside(self.beside)


def publication_in(folder: Location, step: int, disk: Disk, beside: str) -> DiskPublication | RemotePublication:
    """Return how a checkpoint is published in a folder."""
    if isinstance(folder, Address):
        return RemotePublication(folder, step, beside)
    return DiskPublication(folder, step, disk, beside)
