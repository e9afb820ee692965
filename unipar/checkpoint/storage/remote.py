"""Folders at addresses, through fsspec: every call to it, and what its errors are called."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any, final

from typing_extensions import Buffer, override

from unipar.checkpoint.storage.disk import OutputFile
from unipar.errors import CheckpointError, UniparError
from unipar.utils.address import Address

_INSTALL = "pip install 'unipar[remote]'"

_S3 = ("s3", "s3a")

_WITHOUT_FOLDERS = {*_S3, "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "oci", "memory"}
"""Protocols of stores that know no folders: a file is written to any name."""


def open_file_system(address: Address) -> tuple[Any, str]:
    """Return fsspec's file system of an address, and the path in it; raise CheckpointError if a package is missing."""
    try:
        fsspec = import_module("fsspec")
    except ImportError:
        raise CheckpointError(
            f"{address}: addresses need the package fsspec, which is not installed: {_INSTALL}"
        ) from None
    try:
        file_system, path = fsspec.core.url_to_fs(str(address), use_listings_cache=False)  # Any: fsspec has no types
    except ImportError as e:
        install = _INSTALL if address.protocol in _S3 else str(e)
        raise CheckpointError(
            f"{address}: {address.protocol}:// needs a package that is not installed: {install}"
        ) from None
    except ValueError as e:
        raise CheckpointError(f"{address}: {e}") from None
    return file_system, str(path).rstrip("/")


TEMPORARY_FILE = ".tmp-"
"""Beginning of a file's name while it is written to a store that has folders and renames files."""


@contextmanager
def explain_store_errors(called: object, attempt: str) -> Generator[None]:
    """Context manager: any error of a store becomes a CheckpointError: `CALLED cannot be ATTEMPT (REASON)`."""
    try:
        yield
    except UniparError:
        raise
    except Exception as e:  # each store's library has its own kinds
        raise CheckpointError(f"{called}: cannot be {attempt} ({describe_store_error(e)})") from e


def describe_store_error(error: Exception) -> str:
    """Return a store's error in words: the first line that says something, and what to do where that is known."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    text = str(error).strip().partition("\n")[0] or type(error).__name__
    if kinds & {"NoCredentialsError", "PartialCredentialsError"}:
        return f"{text}; give them in the environment (AWS_ACCESS_KEY_ID, ...), or in the file of the store's tools"
    if "PermissionError" in kinds:
        return f"refused: {text}; look at the credentials in the environment, and at what they may do there"
    if "FileNotFoundError" in kinds:
        return text if " " in text else "there is nothing"
    if "ConnectionError" in kinds or "ClientConnectionError" in kinds:
        return f"the store does not answer: {text}"
    return text


@final
class RemoteFolder:
    """Folder at an address; its files are called by their names below it."""

    def __init__(self, address: Address) -> None:
        self.address = address
        with explain_store_errors(address, "opened"):
            self._files, self._path = open_file_system(address)

    def _at(self, name: str) -> str:
        return f"{self._path}/{name}"

    @property
    def _is_s3(self) -> bool:
        return self.address.protocol in _S3

    def sizes(self) -> dict[str, int]:
        """Return the files below the folder with their sizes; none if there is no such folder."""
        with explain_store_errors(self.address, "listed"):
            try:
                entries: dict[str, Any] = self._files.find(self._path, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return {}
        below = len(self._path) + 1
        return {path[below:]: int(info["size"]) for path, info in entries.items() if path.startswith(self._at(""))}

    def names(self) -> list[str]:
        """Return the names of folders and files in the folder; none if there is no such folder."""
        with explain_store_errors(self.address, "listed"):
            try:
                paths: list[str] = self._files.ls(self._path, detail=False)
            except (FileNotFoundError, NotADirectoryError):
                return []
        return sorted({path.rstrip("/").rpartition("/")[2] for path in paths if path.startswith(self._at(""))})

    def has(self, name: str) -> bool:
        """Return whether there is a file."""
        with explain_store_errors(self.address / name, "looked for"):
            return bool(self._files.exists(self._at(name)))

    def size(self, name: str) -> int:
        """Return the size of a file."""
        with explain_store_errors(self.address / name, "opened"):
            info: dict[str, Any] = self._files.info(self._at(name))
        if info.get("type") != "file" or info.get("islink"):
            raise CheckpointError(f"{self.address / name}: not a regular file")
        return int(info["size"])

    def read(self, name: str, first: int, count: int) -> bytes:
        """Return bytes of a file from `first`; fewer if it ends before."""
        with explain_store_errors(self.address / name, f"read at byte {first:,}"):
            return self._files.cat_file(self._at(name), start=first, end=first + count)

    def create(self, name: str) -> OutputFile:
        """Open a file for writing, which is there once it is flushed."""
        path = self._at(name)
        with explain_store_errors(self.address / name, "written"):
            if self.address.protocol in _WITHOUT_FOLDERS:
                return RemoteOutput(self.address / name, self._files.open(path, "wb"))
            above, _, last = path.rpartition("/")
            self._files.makedirs(above, exist_ok=True)
            under = f"{above}/{TEMPORARY_FILE}{last}"
            return RemoteOutput(self.address / name, self._files.open(under, "wb"), lambda: self._files.mv(under, path))

    def write(self, name: str, data: bytes) -> None:
        """Write a small file."""
        with self.create(name) as file:
            file.write(memoryview(data))
            file.flush()

    def delete(self, names: Iterable[str]) -> None:
        """Delete files, one after the other; one that is gone already is no error."""
        for name in names:
            with explain_store_errors(self.address / name, "deleted"), suppress(FileNotFoundError):
                self._files.rm_file(self._at(name))

    def delete_empty_folders(self) -> None:
        """Delete the folder and those below it where a store has folders, once they are empty."""
        if self.address.protocol not in _WITHOUT_FOLDERS:
            with explain_store_errors(self.address, "deleted"), suppress(FileNotFoundError):
                self._files.rm(self._path, recursive=True)

    def abort_uploads(self) -> None:
        """Give up uploads in parts below the folder, whose writer died: S3 keeps their parts, and charges for them."""
        if not self._is_s3:
            return
        bucket, _, prefix = self._path.partition("/")
        with explain_store_errors(self.address, "cleared of unfinished uploads"):
            listing: dict[str, Any] = self._files.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=f"{prefix}/")
            for upload in listing.get("Uploads") or ():
                which = {"Bucket": bucket, "Key": upload["Key"], "UploadId": upload["UploadId"]}
                self._files.call_s3("abort_multipart_upload", **which)


@final
class RemoteOutput(OutputFile):
    """File at an address that is being written: it is there, all of it, once it is flushed."""

    def __init__(self, address: Address, file: Any, put_in_place: Callable[[], None] = lambda: None) -> None:
        """`put_in_place` gives a file its name where a store shows files while they are written."""
        super().__init__(address, -1)
        self._file: Any = file
        self._put_in_place = put_in_place

    @override
    def write(self, data: memoryview) -> int:
        with explain_store_errors(self.path, "written"):
            self._file.write(data)
        return len(data)

    @override
    def flush(self) -> None:
        with explain_store_errors(self.path, "written"):
            self._file.close()
            self._put_in_place()
        self._file = None

    @override
    def close(self) -> None:
        file, self._file = self._file, None
        if file is None:
            return
        with suppress(Exception):  # what is left is no checkpoint, and goes with the next save
            file.discard()
        with suppress(Exception):
            file.closed = True  # so that fsspec does not finish the upload when it frees the object


_WINDOW = 2**20
"""Bytes that are read at least: many small tensors of a shard come with one request."""


@final
class RemoteFile:
    """File of a checkpoint at an address, read by ranges of bytes."""

    chunk = 2**23
    """Bytes that are read at a time where the whole file is."""

    def __init__(self, folder: Address, name: str) -> None:
        self.called = str(folder / name)
        self._folder, self._name = RemoteFolder(folder), name
        self.bytes = self._folder.size(name)
        self._window = (0, b"")
        """First byte, and bytes, of what was read last."""

    def close(self) -> None:
        """Do nothing: each range is a request of its own."""

    def read_into(self, first: int, buffer: Buffer) -> None:
        """Fill a buffer with the bytes from `first`; several threads may read at the same time."""
        view = memoryview(buffer)
        view = view if view.format == "B" and view.ndim == 1 else view.cast("B")
        if not view:
            return
        begin, data = self._window
        if not begin <= first <= first + len(view) <= begin + len(data):
            begin, data = first, self._folder.read(self._name, first, min(max(len(view), _WINDOW), self.bytes - first))
            if len(view) < _WINDOW:
                self._window = begin, data
        if len(data) < first - begin + len(view):
            raise CheckpointError(
                f"{self.called}: ends at byte {begin + len(data):,}; it became shorter while it was read"
            )
        view[:] = memoryview(data)[first - begin : first - begin + len(view)]
