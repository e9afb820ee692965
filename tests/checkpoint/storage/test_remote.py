"""Folders at addresses: files in them, read by ranges, over HTTP; and errors of a store as sentences."""

from __future__ import annotations

import sys
import urllib.request
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests.support.object_store import ObjectStore, object_store
from unipar.checkpoint.storage.remote import RemoteFile, RemoteFolder, open_file_system
from unipar.errors import CheckpointError
from unipar.utils.address import Address, parse_address


@pytest.fixture(scope="module")
def store() -> Generator[ObjectStore]:
    with object_store() as made:
        yield made


@pytest.fixture(params=["s3", "memory", "file"])
def folder(request: pytest.FixtureRequest, store: ObjectStore, tmp_path: Path) -> Address:
    """A folder that does not exist, of each kind of file system."""
    places = {
        "s3": f"{store.address}/{tmp_path.name}",
        "memory": f"memory://{tmp_path.name}",
        "file": f"file://{tmp_path}",
    }
    return parse_address(f"{places[request.param]}/a/b")


def test_files_are_written_listed_read_and_deleted(folder: Address) -> None:
    """The same on an object store, in memory and in folders of a disk."""
    files = RemoteFolder(folder)
    assert (files.sizes(), files.names(), files.has("one")) == ({}, [], False)
    files.write("one", b"1")
    files.write("below/two", b"0123456789")
    assert files.sizes() == {"one": 1, "below/two": 10}
    assert files.names() == ["below", "one"]
    assert RemoteFolder(folder.parent).names() == ["b"]
    assert files.has("below/two")
    assert files.read("below/two", 3, 4) == b"3456"
    files.write("one", b"another")
    assert files.sizes()["one"] == 7
    files.delete(["one", "one"])
    files.delete(files.sizes())
    files.delete_empty_folders()
    assert (files.sizes(), files.names(), RemoteFolder(folder.parent).names()) == ({}, [], [])


def test_a_file_is_there_once_it_is_flushed(folder: Address) -> None:
    """One that is given up never has its name; fsspec's memory, for tests alone, shows it while it is written."""
    files = RemoteFolder(folder)
    with files.create("given up") as file:
        file.write(memoryview(b"half"))
    assert not files.has("given up") or folder.protocol == "memory"
    with files.create("whole") as file:
        file.write(memoryview(b"who"))
        file.write(memoryview(b"le"))
        file.flush()
    assert files.read("whole", 0, 9) == b"whole"


def test_ranges_of_a_file(folder: Address) -> None:
    """Short ones near each other come from one request; each byte is the file's."""
    data = bytes(range(256)) * 5000
    RemoteFolder(folder).write("x", data)
    file = RemoteFile(folder, "x")
    assert file.bytes == len(data) == 1_280_000
    for first, count in ((0, 8), (8, 100), (100, 9), (1_279_999, 1), (5, 1_200_000), (1_000_000, 280_000), (7, 0)):
        into = bytearray(count)
        file.read_into(first, into)
        assert into == data[first : first + count]
    RemoteFolder(folder).write("x", data[:100])
    with pytest.raises(CheckpointError, match=r"/x: ends at byte 100; it became shorter while it was read$"):
        file.read_into(50, bytearray(2**20))


def test_reading_makes_few_requests(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many small tensors come with one request; a large one comes alone and without what is beside it."""
    folder = parse_address(f"{store.address}/few")
    RemoteFolder(folder).write("x", bytes(3 * 2**20))
    asked: list[tuple[int, int]] = []
    read = RemoteFolder.read

    def counted(self: RemoteFolder, name: str, first: int, count: int) -> bytes:
        asked.append((first, count))
        return read(self, name, first, count)

    monkeypatch.setattr(RemoteFolder, "read", counted)
    file = RemoteFile(folder, "x")
    for first in range(0, 2**20, 2**12):
        file.read_into(first, bytearray(2**12))
    file.read_into(2**20 + 5, bytearray(2**21 - 5))
    assert asked == [(0, 2**20), (2**20 + 5, 2**21 - 5)]


def test_an_upload_that_was_given_up_leaves_no_parts(store: ObjectStore) -> None:
    """S3 keeps the parts of an upload whose writer died, and charges for them; other folders' are left alone."""
    mine, other = (parse_address(f"{store.address}/parts/{name}") for name in ("mine", "other"))
    s3, path = open_file_system(mine)
    for name in (path, f"{path}/step-00000001", open_file_system(other)[1]):
        s3.call_s3("create_multipart_upload", Bucket="bucket", Key=f"{name.partition('/')[2]}/x")
    RemoteFolder(mine).abort_uploads()
    left = s3.call_s3("list_multipart_uploads", Bucket="bucket", Prefix="parts/")["Uploads"]
    assert [upload["Key"] for upload in left] == ["parts/other/x"]


def test_a_missing_bucket(store: ObjectStore) -> None:
    """A bucket that is not there is not made: a typing error must not become a bucket."""
    with pytest.raises(CheckpointError) as told:
        RemoteFolder(parse_address("s3://nobucket/a")).write("x", b"1")
    assert str(told.value) == "s3://nobucket/a/x: cannot be written (The specified bucket does not exist)"
    with pytest.raises(CheckpointError) as told:
        RemoteFolder(parse_address("s3://nobucket/a")).write("x", b"1")
    assert RemoteFolder(parse_address("s3://nobucket/a")).names() == []


def test_wrong_credentials(store: ObjectStore) -> None:
    """The store's own words, and where to look; the secret is not among them."""
    url = f"{store.endpoint}/moto-api/reset-auth"

    def check_keys_after(requests: bytes) -> None:
        asked = urllib.request.Request(url, requests, {"Content-Type": "text/plain"}, method="POST")
        with urllib.request.urlopen(asked):
            pass

    check_keys_after(b"0")
    try:
        with pytest.raises(CheckpointError) as told:
            RemoteFolder(parse_address(store.address)).write("x", b"1")
    finally:
        check_keys_after(b"inf")
    assert str(told.value) == (
        "s3://bucket/x: cannot be written (refused: The AWS Access Key Id you provided does not exist in our records.; "
        "look at the credentials in the environment, and at what they may do there)"
    )


def test_no_credentials(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in the environment nor in a file."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", "/nonexistent")
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    try:
        with pytest.raises(CheckpointError) as told:
            RemoteFolder(parse_address(store.address)).write("x", b"1")
    finally:
        s3fs.S3FileSystem.clear_instance_cache()
    assert str(told.value) == (
        "s3://bucket/x: cannot be written (Unable to locate credentials; give them in the environment "
        "(AWS_ACCESS_KEY_ID, ...), or in the file of the store's tools)"
    )


def test_a_store_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """An address at which nothing listens."""
    import s3fs

    for name, value in ObjectStore("http://127.0.0.1:9", "s3://bucket").environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")  # it tries again for seconds otherwise
    s3fs.S3FileSystem.clear_instance_cache()
    try:
        with pytest.raises(CheckpointError) as told:
            RemoteFolder(parse_address("s3://bucket")).write("x", b"1")
    finally:
        s3fs.S3FileSystem.clear_instance_cache()
    assert str(told.value) == (
        "s3://bucket/x: cannot be written (the store does not answer: Could not connect to the endpoint URL: "
        '"http://127.0.0.1:9/bucket/x")'
    )


def test_missing_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command to type, for fsspec, for S3 and for another store; and a protocol that nobody knows."""
    monkeypatch.setitem(sys.modules, "fsspec", None)
    assert sentence("s3://bucket/a") == (
        "s3://bucket/a: addresses need the package fsspec, which is not installed: pip install 'unipar[remote]'"
    )
    monkeypatch.undo()
    with pytest.MonkeyPatch.context() as patch:
        known: dict[str, Any] = sys.modules["fsspec.registry"]._registry
        patch.delitem(known, "s3", raising=False)
        patch.setitem(sys.modules, "s3fs", None)
        assert sentence("s3://bucket/a") == (
            "s3://bucket/a: s3:// needs a package that is not installed: pip install 'unipar[remote]'"
        )
    assert sentence("gs://bucket/a") == (
        "gs://bucket/a: gs:// needs a package that is not installed: Please install gcsfs to access Google Storage"
    )
    assert sentence("nosuch://bucket/a") == "nosuch://bucket/a: Protocol not known: nosuch"


def sentence(text: str) -> str:
    with pytest.raises(CheckpointError) as told:
        open_file_system(parse_address(text))
    return str(told.value)
