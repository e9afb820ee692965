"""The check of the folder for checkpoints before the first step: the same sentence on all ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from typing_extensions import override

from tests.support.checkpoints import Meeting
from unipar.checkpoint.protocol.probing import check_checkpoint_folder
from unipar.checkpoint.storage.disk import Disk, OutputFile
from unipar.checkpoint.storage.remote import RemoteFolder
from unipar.errors import CheckpointError
from unipar.utils.address import Location, parse_address


def check(folders: Sequence[Location], machines: str = "aa", disk: Disk | None = None) -> set[str]:
    """Check as one rank for each folder does; return the sentences that they raise, or "" for none."""
    meeting = Meeting(len(folders))

    def one(rank: int) -> str:
        try:
            check_checkpoint_folder(
                folders[rank],
                1000,
                rank=rank,
                decide=meeting.rounds(rank),
                machine=f"node-{machines[rank]}",
                disk=disk,
                patience=0.2,
            )
        except CheckpointError as e:
            return str(e)
        return ""

    with ThreadPoolExecutor(len(folders)) as pool:
        return set(pool.map(one, range(len(folders))))


def test_a_folder_is_made_and_left_empty(tmp_path: Path) -> None:
    """On a disk, where what a killed process left is deleted, and at an address."""
    folder = tmp_path / "a" / "b"
    assert check([folder, folder]) == {""}
    (folder / ".tmp-probe-0123abcd").touch()
    assert check([folder]) == {""}
    assert os.listdir(folder) == []
    address = parse_address(f"memory://{tmp_path.name}/probed")
    RemoteFolder(address).write(".tmp-probe-0123abcd", b"")
    assert check([address, address]) == {""}
    assert RemoteFolder(address).names() == []


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    """A file is in its way."""
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "below"
    assert check([folder, folder]) == {f"no checkpoint can be saved in {folder}: rank 0: {folder}: Not a directory"}


def test_too_little_space(tmp_path: Path) -> None:
    """The parts of all ranks together, as far as their sizes are known."""

    class Small(Disk):
        @override
        def free_bytes(self, path: Path) -> int:
            return 1999

    assert check([tmp_path, tmp_path], disk=Small()) == {
        f"no checkpoint can be saved in {tmp_path}: rank 0: it needs 2.0 KiB and 2.0 KiB are free: free some space, "
        "keep fewer checkpoints, or save elsewhere"
    }
    assert check([tmp_path], disk=Small()) == {""}


@pytest.mark.parametrize(("machines", "where"), [("ab", "on node-b"), ("aa", "on node-a as well")])
def test_each_machine_has_a_folder_of_its_own(tmp_path: Path, machines: str, where: str) -> None:
    """The rank that does not see what rank 0 wrote is named, with both machines and the way out."""
    told = check([tmp_path / "disk of a", tmp_path / "disk of b"], machines)
    words = (
        f"rank 1: it is {where}, and does not see there what rank 0 wrote on node-a: name a folder in checkpoint.to "
        "that all ranks share, or an address such as s3://bucket/path"
    )
    assert {text.partition(": ")[2] for text in told} == {words}


def test_a_rank_that_may_not_write(tmp_path: Path) -> None:
    """Rank 0 can, and another cannot."""

    class Refusing(Disk):
        @override
        def create(self, path: Path) -> OutputFile:
            if path.name.endswith("-1"):
                raise PermissionError(13, "Permission denied", str(path))
            return super().create(path)

    (told,) = check([tmp_path, tmp_path], disk=Refusing())
    assert told.startswith(f"no checkpoint can be saved in {tmp_path}: rank 1: {tmp_path}/.tmp-probe-")
    assert told.endswith("-1: Permission denied")
    assert os.listdir(tmp_path) == []
