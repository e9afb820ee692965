"""Checkpoints at addresses: nothing is renamed there, so that what is written last, and deleted first, decides."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.checkpoints import floats, pieces_of_rank, save_on_ranks, save_two_steps
from tests.support.object_store import object_store
from unipar.backend import Region
from unipar.checkpoint.protocol.remote_steps import list_remote_steps
from unipar.checkpoint.protocol.retention import Retention
from unipar.checkpoint.protocol.save_checkpoint import SavedCheckpoint, save_checkpoint
from unipar.checkpoint.protocol.verifying import find_checkpoints, inspect_checkpoint, verify_checkpoint
from unipar.checkpoint.saved_state import SavedState
from unipar.checkpoint.storage.disk import OutputFile
from unipar.checkpoint.storage.remote import RemoteFolder
from unipar.errors import CheckpointError
from unipar.utils.address import Address, parse_address

SHARDS = ["shards/rank-00000.safetensors", "shards/rank-00001.safetensors"]


@pytest.fixture
def folder(tmp_path: Path) -> Address:
    """A new folder in memory: the whole protocol without a network."""
    return parse_address(f"memory://{tmp_path.name}/{tmp_path.parent.name}/run")


@contextmanager
def operations(before: Callable[[str, str], None]) -> Generator[None]:
    """Context manager: `before` is called with each operation that changes something, and the file's address."""
    create, delete = RemoteFolder.create, RemoteFolder.delete

    def creating(self: RemoteFolder, name: str) -> OutputFile:
        before("create", str(self.address / name))
        file = create(self, name)
        flush = file.flush

        def flushing() -> None:
            before("flush", str(self.address / name))
            flush()
            before("flushed", str(self.address / name))

        file.flush = flushing
        return file

    def deleting(self: RemoteFolder, names: list[str]) -> None:
        for name in names:
            before("delete", str(self.address / name))
            delete(self, [name])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RemoteFolder, "create", creating)
        patch.setattr(RemoteFolder, "delete", deleting)
        yield


def save(folder: Address, step: int, keep: int = 3) -> SavedCheckpoint:
    return save_checkpoint(folder, step, pieces_of_rank(0, step, world=1), {}, retention=Retention(keep))


def steps(folder: Address) -> list[int]:
    return [found.step for found in find_checkpoints(folder)]


def test_a_checkpoint_at_an_address_is_the_one_on_a_disk(folder: Address, tmp_path: Path) -> None:
    """The same files with the same bytes; and any region of a tensor is read back."""
    there, again = save_on_ranks(folder, 42)
    on_disk, _ = save_on_ranks(tmp_path, 42)
    assert isinstance(there, SavedCheckpoint)
    assert isinstance(on_disk, SavedCheckpoint)
    assert there == again
    assert str(there.path) == f"{folder}/step-00000042"
    files = RemoteFolder(folder / "step-00000042")
    assert sorted(files.sizes()) == ["manifest.json", "manifest.sha256", *SHARDS, "state.json"]
    for name, size in files.sizes().items():
        assert files.read(name, 0, size) == (tmp_path / "step-00000042" / name).read_bytes()
    contents = verify_checkpoint(there.path)
    with SavedState(there.path, contents.manifest) as state:
        part = state("net.weight", "weight", Region(1, 5))
        assert part.tolist() == [43.0, 44.0, 45.0, 46.0, 47.0]
        assert state.bytes_read == 20


def test_the_seal_is_written_last_and_deleted_first(folder: Address) -> None:
    """All shards and the state, then the manifest, then its hash: by that one a checkpoint is published."""
    done: list[str] = []
    with operations(lambda what, name: done.append(f"{what} {name.removeprefix(f'{folder}/')}")):
        save_on_ranks(folder, 1, retention=Retention(1))
        written = [word.removeprefix("flushed step-00000001/") for word in done if word.startswith("flushed")]
        assert sorted(written[:3]) == [*SHARDS, "state.json"]
        assert written[3:] == ["manifest.json", "manifest.sha256"]
        done.clear()
        save_on_ranks(folder, 2, retention=Retention(1))
    deleted = [word for word in done if word.startswith("delete")]
    assert deleted[0] == "delete step-00000001/manifest.sha256"
    assert len(deleted) == 5
    assert done.index(deleted[0]) > done.index("flushed step-00000002/manifest.sha256")
    assert steps(folder) == [2]


def test_an_operation_that_fails_leaves_what_was_there(folder: Address) -> None:
    """Each in turn, on any rank: one sentence on all ranks, older checkpoints whole, and the next save goes well."""
    count = 0
    save_two_steps(folder)

    def fail_at(number: int) -> Callable[[str, str], None]:
        done = 0

        def before(what: str, name: str) -> None:
            nonlocal done, count
            done, count = done + 1, max(count, done + 1)
            if done == number:
                raise OSError("the line was cut")

        return before

    number, published = 0, 0
    while number <= count:
        number += 1
        before = steps(folder)
        with operations(fail_at(number)):
            outcomes = save_on_ranks(folder, before[0] + 1, retention=Retention(2))
        for found in find_checkpoints(folder):
            verify_checkpoint(found.path)
        if isinstance(outcomes[0], SavedCheckpoint):
            published += 1
            assert steps(folder)[:2] == [before[0] + 1, before[0]]
        else:
            assert len({str(outcome) for outcome in outcomes}) == 1
            assert steps(folder)[:2] in (before[:2], [before[0] + 1, before[0]])
        assert isinstance(save(folder, before[0] + 2, keep=2), SavedCheckpoint)
        assert list_remote_steps(folder)[1] == []
    assert count > 15
    assert published  # deletions of old ones may fail


def test_a_failed_upload_says_so_on_all_ranks(folder: Address) -> None:
    """The file, the store's words, and that nothing is published."""

    def before(what: str, name: str) -> None:
        if what == "flush" and name.endswith("rank-00001.safetensors"):
            raise CheckpointError(f"{name}: cannot be written (the line was cut)")

    with operations(before):
        outcomes = save_on_ranks(folder, 7)
    assert [str(outcome) for outcome in outcomes] == 2 * [
        f"checkpoint of step 7 in {folder}: rank 1: {folder}/step-00000007/shards/rank-00001.safetensors: cannot be "
        "written (the line was cut); it is not published; those of other steps are as they were"
    ]
    assert RemoteFolder(folder).sizes() == {}


def test_a_seal_that_may_have_been_written(folder: Address) -> None:
    """The answer to the last request is lost: what can be withdrawn is, and the sentence is true."""

    def before(what: str, name: str) -> None:
        if what == "flushed" and name.endswith("manifest.sha256"):
            raise CheckpointError(f"{name}: cannot be written (the line was cut)")

    with operations(before):
        outcomes = save_on_ranks(folder, 7)
    assert all("(the line was cut); it is not published; those of other" in str(outcome) for outcome in outcomes)
    assert steps(folder) == []


def test_an_upload_that_did_not_end(folder: Address) -> None:
    """An upload that was cut is not listed, not resumed from, said to be what it is, and goes with the next save."""
    save(folder, 3)
    for name in (*SHARDS, "manifest.json"):
        RemoteFolder(folder / "step-00000004").write(name, b"left by a killed writer")
    assert steps(folder) == [3]
    with pytest.raises(CheckpointError) as told:
        inspect_checkpoint(folder / "step-00000004")
    assert str(told.value) == (
        f"{folder}/step-00000004: not published: there is no manifest.sha256, so its upload did not end"
    )
    with pytest.raises(CheckpointError, match=r"/step-00000009: no checkpoint \(there is nothing in it\)$"):
        inspect_checkpoint(folder / "step-00000009")
    assert save(folder, 5).remarks == ()
    assert RemoteFolder(folder).names() == ["step-00000003", "step-00000005"]


def test_a_whole_checkpoint_is_not_replaced(folder: Address) -> None:
    """Two cannot swap their names at an address; a broken one is replaced, and a line says so."""
    save(folder, 3)
    with pytest.raises(CheckpointError) as told:
        save(folder, 3)
    assert str(told.value) == (
        f"checkpoint of step 3 in {folder}: rank 0: {folder}/step-00000003 is there already and is whole, and at an "
        "address no checkpoint is replaced: delete it, or save elsewhere; it is not published; those of other steps "
        "are as they were"
    )
    verify_checkpoint(folder / "step-00000003")
    RemoteFolder(folder / "step-00000003").write("state.json", b"{}")
    assert save(folder, 3).remarks == (
        f"{folder}/step-00000003/state.json: 2 bytes; manifest.json says 29; it is replaced",
    )
    verify_checkpoint(folder / "step-00000003")


def test_another_writer_at_the_same_address(folder: Address) -> None:
    """A file that this run did not write, or another size: it is not published."""

    def before(what: str, name: str) -> None:
        if what == "create" and name.endswith("manifest.json"):
            RemoteFolder(folder / "step-00000001").write(SHARDS[1], b"another run's")

    with operations(before):
        outcomes = save_on_ranks(folder, 1)
    assert str(outcomes[0]).startswith(
        f"checkpoint of step 1 in {folder}: rank 0: {folder}/step-00000001/shards/rank-00001.safetensors: 13 bytes are "
        "there, and 386 bytes were written: another run may save to the same address; it is not published"
    )
    assert steps(folder) == []


def flip(data: bytes) -> bytes:
    return data[:-1] + b"\x07"


def cut(data: bytes) -> bytes:
    return data[:-1]


def add(data: bytes) -> bytes:
    return data + b" "


@pytest.mark.parametrize(
    ("name", "change", "sentence"),
    [
        (SHARDS[1], flip, "its hash is not the one in manifest.json; its bytes changed"),
        (SHARDS[1], cut, "385 bytes; manifest.json says 386"),
        ("manifest.json", add, "its SHA-256 is not the one in manifest.sha256"),
        ("shards/rank-00002.safetensors", add, "not listed in manifest.json"),
        ("extra.pkl", add, "not listed in manifest.json"),
    ],
)
def test_damage_is_found(folder: Address, name: str, change: Callable[[bytes], bytes], sentence: str) -> None:
    """As on a disk: sizes, hashes and the set of files, before a tensor is read."""
    save_on_ranks(folder, 1)
    files = RemoteFolder(folder / "step-00000001")
    files.write(name, change(files.read(name, 0, 10**6) if files.has(name) else b""))
    with pytest.raises(CheckpointError, match=sentence):
        verify_checkpoint(files.address)


def test_over_http() -> None:
    """The same on an object store: two ranks save twice, the older goes; a missing shard is found."""
    with object_store() as store:
        folder = parse_address(f"{store.address}/some/run")
        for step in (1, 2):
            for outcome in save_on_ranks(folder, step, retention=Retention(1)):
                assert isinstance(outcome, SavedCheckpoint), outcome
        assert steps(folder) == [2]
        path = folder / "step-00000002"
        with SavedState(path, verify_checkpoint(path).manifest) as state:
            assert state.whole("net.weight", "step").item() == 2.0
            assert state.whole("net.weight", "exp_avg").flatten()[:3].numpy().tobytes() == floats(2, 3, 4)
        RemoteFolder(path).delete([SHARDS[0]])
        with pytest.raises(CheckpointError, match=r"rank-00000\.safetensors: missing, though manifest.json lists it"):
            verify_checkpoint(path)
