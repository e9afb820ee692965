"""Finding checkpoints, and checking everything about one before a tensor is read from it."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

from xxhash import xxh3_128

from unipar.backend import Region
from unipar.checkpoint.format.manifest import Manifest, StoredTensor, check_format_version, parse_manifest
from unipar.checkpoint.format.names import (
    DEEPEST_JSON,
    LARGEST_JSON,
    MANIFEST_FILE,
    SEAL_FILE,
    SHARD_FOLDER,
    STATE_FILE,
    folder_of_shard,
    is_beside,
    piece_shape,
    step_folder_name,
    step_of_folder,
)
from unipar.checkpoint.format.shard_file import ShardReader, folder_of_file, open_stored_file, read_stored
from unipar.checkpoint.format.strict_json import parse_strict_json
from unipar.checkpoint.format.tiling import explain_tiling_fault
from unipar.checkpoint.protocol.remote_steps import list_remote_steps
from unipar.checkpoint.storage.remote import RemoteFolder
from unipar.errors import CheckpointError
from unipar.utils.address import Address, Location
from unipar.utils.text import first_few

_REQUESTS = 8
"""Files at an address that are read at a time."""

HashProgress = Callable[[int, int], None]
"""Callback with the bytes hashed so far and their total; called from several threads, one at a time."""


class CheckpointFolder(NamedTuple):
    """Folder with the name of a published checkpoint; nothing else is known of it."""

    step: int
    path: Location


@dataclass(frozen=True)
class CheckpointContents:
    """Checkpoint whose files were checked."""

    path: Location
    manifest: Manifest
    state: dict[str, Any]
    """Contents of state.json."""


def find_checkpoints(folder: Location) -> list[CheckpointFolder]:
    """Return what has the name of a checkpoint in a folder, newest first; nothing if there is no such folder."""
    if isinstance(folder, Address):
        names, _ = list_remote_steps(folder)
    else:
        names = list_names(folder)
    steps = [(step, name) for name in names if (step := step_of_folder(name)) is not None]
    return [CheckpointFolder(step, folder / name) for step, name in sorted(steps, reverse=True)]


def list_names(folder: Location) -> list[str]:
    """Return the names in a folder; nothing if there is no such folder."""
    if isinstance(folder, Address):
        return RemoteFolder(folder).names()
    try:
        return sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as e:
        raise CheckpointError(f"{folder}: cannot be listed ({e.strerror})") from None


def verify_checkpoint(
    path: Location,
    *,
    threads: int = 2,
    share: tuple[int, int] = (0, 1),
    progress: HashProgress | None = None,
    beside: bool = True,
) -> CheckpointContents:
    """Check everything about a checkpoint, hashes of all files included; raise CheckpointError if anything is amiss.

    Where several ranks verify together, `share` is (rank, world): each hashes its share of the shards and checks all
    else, so that together they have hashed all. `beside`: whether weights that are not trained are to be read as well,
    which are in files beside the checkpoint.
    """
    checkpoint = inspect_checkpoint(path, beside=beside)
    rank, world = share
    names = sorted(checkpoint.manifest.files, key=lambda name: (-checkpoint.manifest.files[name].bytes, name))
    names = [name for name in names if name != STATE_FILE and (beside or not is_beside(name))][rank::world]
    _hash_files(checkpoint, names, threads, progress)
    return checkpoint


def inspect_checkpoint(path: Location, *, beside: bool = True) -> CheckpointContents:
    """Return a checkpoint's contents after all checks but the hashes of shards; raise CheckpointError if one fails.

    `beside`: as for `verify_checkpoint`.
    """
    _check_folder(path)
    manifest = read_manifest(path)
    step = step_of_folder(path.name)
    if step is not None and step != manifest.step:
        raise CheckpointError(f"{path / MANIFEST_FILE}: of step {manifest.step}, in the folder of step {step}")
    _check_file_set(path, manifest, beside=beside)
    state = _read_state(path, manifest)
    for name, pieces in manifest.pieces_by_file.items():
        if name != STATE_FILE and (beside or not is_beside(name)):
            _check_shard(path, name, manifest.files[name].bytes, pieces)
    for tensor in manifest.tensors.values():
        check_tiling(tensor, f"{path / MANIFEST_FILE}")
    return CheckpointContents(path, manifest, state)


def check_tiling(tensor: StoredTensor, called: str) -> None:
    """Raise CheckpointError, beginning with `called`, unless each element of a tensor is in exactly one piece."""
    if fault := explain_tiling_fault([piece.where for piece in tensor.pieces], tensor.numel):
        why, numbers = fault
        guilty = [f"{tensor.pieces[i].key!r} in {tensor.pieces[i].file}" for i in numbers]
        subject = " and ".join(guilty) if guilty else "its pieces"
        raise CheckpointError(f"{called}: {tensor}, of shape {list(tensor.shape)}: {subject} {why}")


def _check_folder(path: Location) -> None:
    if isinstance(path, Address):
        _check_address(path)
        return
    try:
        mode = path.lstat().st_mode
    except OSError as e:
        raise CheckpointError(f"{path}: no checkpoint ({e.strerror})") from None
    if stat.S_ISLNK(mode):
        raise CheckpointError(f"{path}: a symlink; name the folder itself, {path.resolve()}")
    if not stat.S_ISDIR(mode):
        raise CheckpointError(f"{path}: not a folder; a checkpoint is a folder such as {step_folder_name(500)}")
    if not os.path.lexists(path / SEAL_FILE) and not os.path.lexists(path / MANIFEST_FILE):
        checkpoints = find_checkpoints(path) or find_checkpoints(path / "checkpoints")  # a run folder keeps them there
        inside = first_few([str(one.path.relative_to(path)) for one in checkpoints if isinstance(one.path, Path)])
        raise CheckpointError(
            f"{path}: not a unipar checkpoint: there is no {MANIFEST_FILE} in it"
            + (f"; name one of the checkpoints in it: {inside}" if inside else "")
        )


def _check_address(address: Address) -> None:
    files = RemoteFolder(address)
    if files.has(SEAL_FILE):
        return
    if inside := first_few([checkpoint.path.name for checkpoint in find_checkpoints(address)]):
        raise CheckpointError(f"{address}: not a unipar checkpoint; name one of the checkpoints in it: {inside}")
    there = files.sizes()
    if step_of_folder(address.name) is not None and there:
        raise CheckpointError(f"{address}: not published: there is no {SEAL_FILE}, so its upload did not end")
    raise CheckpointError(f"{address}: no checkpoint (there is {f'no {SEAL_FILE}' if there else 'nothing'} in it)")


def _read_whole(path: Location, name: str, largest: int) -> bytes:
    with open_stored_file(path, name) as file:
        if file.bytes > largest:
            raise CheckpointError(f"{file.called}: {file.bytes:,} bytes; at most {largest:,} are read")
        return read_stored(file, 0, file.bytes)


def read_manifest(path: Location) -> Manifest:
    """Return the manifest of a checkpoint after a check of its hash."""
    seal = _read_whole(path, SEAL_FILE, 200)
    data = _read_whole(path, MANIFEST_FILE, LARGEST_JSON)
    if seal != seal_of_manifest(data):
        raise CheckpointError(f"{path / MANIFEST_FILE}: its SHA-256 is not the one in {SEAL_FILE}; one of them changed")
    return parse_manifest(data, f"{path / MANIFEST_FILE}")


def seal_of_manifest(data: bytes) -> bytes:
    """Return the contents of manifest.sha256: `sha256sum -c manifest.sha256` accepts them."""
    return f"{hashlib.sha256(data).hexdigest()}  {MANIFEST_FILE}\n".encode()


def _check_file_set(path: Location, manifest: Manifest, *, beside: bool) -> None:
    """Raise CheckpointError unless the folder holds the files of the manifest and no other entry.

    Files beside it, which other checkpoints share, have to be there too.
    """
    shared = sorted(filter(is_beside, manifest.files))
    wanted = {MANIFEST_FILE, SEAL_FILE, *manifest.files} - {*shared}
    present = set(RemoteFolder(path).sizes()) if isinstance(path, Address) else _files_on_disk(path)
    if extra := sorted(present - wanted):
        raise CheckpointError(f"{path / extra[0]}: not listed in {MANIFEST_FILE}; a checkpoint holds no other files")
    if missing := sorted(wanted - present):
        raise CheckpointError(f"{path / missing[0]}: missing, though {MANIFEST_FILE} lists it")
    for name in shared if beside else ():
        above = folder_of_file(path, name)
        there = RemoteFolder(above).has(name) if isinstance(above, Address) else os.path.lexists(above / name)
        if not there:
            raise CheckpointError(
                f"{above / name}: missing, though {path / MANIFEST_FILE} lists it: {path.name} has the weights that "
                f"are not trained in the folder {folder_of_shard(name)} beside it; copy that folder to {above} from "
                "where the checkpoint was saved"
            )


def _files_on_disk(path: Path) -> set[str]:
    try:
        files = {name for name in os.listdir(path) if name != SHARD_FOLDER}
        if stat.S_ISLNK((path / SHARD_FOLDER).lstat().st_mode):
            raise CheckpointError(f"{path / SHARD_FOLDER}: a symlink; a checkpoint holds none")
        files |= {f"{SHARD_FOLDER}/{name}" for name in os.listdir(path / SHARD_FOLDER)}
    except OSError as e:
        raise CheckpointError(f"{e.filename}: cannot be listed ({e.strerror})") from None
    return files


def _read_state(path: Location, manifest: Manifest) -> dict[str, Any]:
    called, record = f"{path / STATE_FILE}", manifest.files[STATE_FILE]
    data = _read_whole(path, STATE_FILE, LARGEST_JSON)
    if len(data) != record.bytes:
        raise CheckpointError(f"{called}: {len(data):,} bytes; {MANIFEST_FILE} says {record.bytes:,}")
    if xxh3_128(data).hexdigest() != record.xxh3_128:
        raise CheckpointError(f"{called}: its hash is not the one in {MANIFEST_FILE}; its bytes changed")
    state = parse_strict_json(data, called, largest=LARGEST_JSON, deepest=DEEPEST_JSON)
    check_format_version(state, called)
    if "cell" in state:  # what checkpoints called the strategy before 0.1.0
        state["strategy"] = state.pop("cell")
    if state.get("step") != manifest.step:
        raise CheckpointError(f"{called}: of step {state.get('step')!r}; {MANIFEST_FILE} is of step {manifest.step}")
    return state


def _check_shard(path: Location, name: str, size: int, pieces: Mapping[str, tuple[StoredTensor, Region]]) -> None:
    """Raise CheckpointError if a shard's size or header is not what the manifest says.

    One that checkpoints share may hold more: tensors that one of them has in its own folder, because they changed.
    """
    with open_stored_file(path, name) as file:  # its size first: a truncated file is best called so
        if file.bytes != size:
            raise CheckpointError(
                f"{file.called}: {file.bytes:,} bytes; {MANIFEST_FILE} says {size:,}{_way_back(name)}"
            )
    with ShardReader(path, name) as shard:
        _compare_header(shard, pieces, pieces.keys() if is_beside(name) else shard.tensors.keys() | pieces.keys())


def _way_back(name: str) -> str:
    """Return what to do about a file that is not what it was, if it is one that checkpoints share; else ""."""
    if not is_beside(name):
        return ""
    return f"; all checkpoints that name {folder_of_shard(name)} need it as it was: restore it from a copy"


def _compare_header(
    shard: ShardReader, pieces: Mapping[str, tuple[StoredTensor, Region]], keys: Collection[str]
) -> None:
    if strange := sorted(key for key in keys if (key in shard.tensors) != (key in pieces)):
        which = "in its header, not in" if strange[0] in shard.tensors else "not in its header, but in"
        raise CheckpointError(f"{shard.called}: {strange[0]!r} is {which} {MANIFEST_FILE}")
    for key, (tensor, where) in pieces.items():
        entry, shape = shard.tensors[key], piece_shape(tensor.shape, where)
        if (entry.dtype, entry.shape) != (tensor.dtype, shape):
            raise CheckpointError(
                f"{shard.called}: {key!r} is {entry.dtype} of shape {list(entry.shape)}; {MANIFEST_FILE} says "
                f"{tensor.dtype} of shape {list(shape)}"
            )


def _hash_files(
    checkpoint: CheckpointContents, names: Sequence[str], threads: int, progress: HashProgress | None
) -> None:
    """Hash files in several threads (xxhash releases the interpreter's lock); raise the first difference found."""
    files = checkpoint.manifest.files
    total, done, guard = sum(files[name].bytes for name in names), 0, Lock()
    stopped = False

    def advance(count: int) -> None:
        nonlocal done
        if progress is not None:
            with guard:
                done += count
                progress(done, total)

    def check(name: str) -> None:
        hashed = xxh3_128()
        with open_stored_file(checkpoint.path, name) as file:
            buffer = bytearray(min(file.chunk, file.bytes))
            if file.bytes != files[name].bytes:
                raise CheckpointError(f"{file.called}: its size changed while it was verified")
            for first in range(0, file.bytes, file.chunk):
                if stopped:
                    return
                part = memoryview(buffer)[: min(file.chunk, file.bytes - first)]
                file.read_into(first, part)
                hashed.update(part)
                advance(len(part))
            if hashed.hexdigest() != files[name].xxh3_128:
                raise CheckpointError(
                    f"{file.called}: its hash is not the one in {MANIFEST_FILE}; its bytes changed{_way_back(name)}"
                )

    if isinstance(checkpoint.path, Address):
        threads = max(threads, _REQUESTS)  # they wait for a network, not for a processor
    if threads < 2 or len(names) < 2:
        for name in names:
            check(name)
        return
    with ThreadPoolExecutor(min(threads, len(names)), "unipar-hash") as pool:
        running = [pool.submit(check, name) for name in names]
        try:
            for one in running:
                one.result()
        except BaseException:
            stopped = True
            raise
