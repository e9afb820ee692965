"""Checkpoints at an address: one is published while its manifest.sha256 is there, which is written last."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from unipar.checkpoint.format.names import SEAL_FILE, step_of_folder
from unipar.checkpoint.storage.remote import RemoteFolder
from unipar.utils.address import Address


def list_remote_steps(folder: Address) -> tuple[list[str], list[str]]:
    """Return the names of the checkpoints that are published at an address, and of those whose upload did not end."""
    files = RemoteFolder(folder)
    names = [name for name in files.names() if step_of_folder(name) is not None]
    with ThreadPoolExecutor(8, "unipar-list") as pool:
        sealed = list(pool.map(files.has, [f"{name}/{SEAL_FILE}" for name in names]))
    pairs = list(zip(names, sealed, strict=True))
    return [name for name, is_sealed in pairs if is_sealed], [name for name, is_sealed in pairs if not is_sealed]


def delete_remote_checkpoint(checkpoint: Address) -> None:
    """Delete a folder; a checkpoint's manifest.sha256 first, so that half a deletion is no checkpoint."""
    files = RemoteFolder(checkpoint)
    names = sorted(files.sizes(), key=lambda name: name != SEAL_FILE)
    files.delete(names)
    files.delete_empty_folders()
