"""Saving a checkpoint: all ranks write their files and agree, then one rename or one last file publishes it.

Whatever fails, and whenever a process is killed, checkpoints that were published before stay as they are, and no other
process ever sees a new one that is not whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar, final

from typing_extensions import Buffer

from unipar.backend import Region
from unipar.checkpoint.format.manifest import FileRecord, Manifest, StoredPiece, StoredTensor
from unipar.checkpoint.format.names import (
    DEEPEST_JSON,
    FORMAT,
    LARGEST_JSON,
    MANIFEST_FILE,
    MOST_KEYS,
    PLAIN_FORMAT,
    SEAL_FILE,
    SHARD_FOLDER,
    STATE_FILE,
    folder_of_shard,
    normal_region,
    piece_key,
    piece_shape,
    shard_file_name,
)
from unipar.checkpoint.format.shard_file import HashedFile, ShardTensor, shard_header, sorted_for_shard, write_tensors
from unipar.checkpoint.format.strict_json import dump_strict_json
from unipar.checkpoint.protocol.joint_attempts import attempt_together
from unipar.checkpoint.protocol.publication import DiskPublication, RemotePublication, publication_in
from unipar.checkpoint.protocol.retention import Retention, remove_old_checkpoints
from unipar.checkpoint.protocol.verifying import check_tiling, seal_of_manifest
from unipar.checkpoint.storage.disk import Disk
from unipar.distributed.meeting.text_rounds import Decide, decide_alone
from unipar.errors import CheckpointError
from unipar.utils.address import Location

_T = TypeVar("_T")


class PieceToSave(NamedTuple):
    """Region of one tensor that this rank writes; no other rank writes any of its elements."""

    name: str
    kind: str
    dtype: str
    """Spelled as in safetensors: F32, BF16, I64, ..."""

    shape: tuple[int, ...]
    """Shape of the whole tensor."""

    where: Region
    data: Buffer | Callable[[], Buffer]
    """The region's elements in their order, as contiguous memory, or a function that returns it when needed."""


@dataclass(frozen=True)
class FrozenToSave:
    """Weights that are not trained: in files beside the checkpoints, which all of them share."""

    folder: str
    """Name of the folder to which this checkpoint writes them; "" if an earlier one has."""

    pieces: Sequence[PieceToSave] = ()
    """Pieces that this rank writes there."""

    saved: Mapping[tuple[str, str], StoredTensor] = field(default_factory=dict[tuple[str, str], StoredTensor])
    """Tensors that an earlier checkpoint wrote there; rank 0 knows them."""

    files: Mapping[str, FileRecord] = field(default_factory=dict[str, FileRecord])
    """Sizes and hashes of their files."""


@dataclass(frozen=True)
class SavedCheckpoint:
    """Checkpoint that was published."""

    path: Location
    step: int
    bytes: int
    """Bytes that were written."""

    removed: tuple[int, ...]
    """Steps of older checkpoints that were deleted."""

    remarks: tuple[str, ...]
    """Sentences about older checkpoints that could not be deleted, or are broken."""

    manifest: Manifest | None = field(default=None, compare=False)
    """Contents; rank 0 has them."""


def save_checkpoint(
    folder: Location,
    step: int,
    pieces: Sequence[PieceToSave],
    state: Mapping[str, Any] | None,
    *,
    rank: int = 0,
    decide: Decide = decide_alone,
    retention: Retention | None = None,
    disk: Disk | None = None,
    progress: Callable[[int], None] | None = None,
    frozen: FrozenToSave | None = None,
) -> SavedCheckpoint:
    """Write and publish a checkpoint, then delete old ones; all ranks call it together, with the same step.

    `state` is rank 0's, for state.json. On failure all ranks raise CheckpointError with the same sentence, and nothing
    is published. `progress` gets the bytes of each chunk that this rank has written. `frozen`: weights that are not
    trained, if they are kept beside the checkpoints; all ranks give one, or none.
    """
    beside = "" if frozen is None else frozen.folder
    saving = _Saving(publication_in(folder, step, disk or Disk(), beside), rank, decide, progress, frozen)
    return saving.save(pieces, state, retention or Retention())


@final
class _Saving:
    """One save on one rank."""

    def __init__(
        self,
        publication: DiskPublication | RemotePublication,
        rank: int,
        decide: Decide,
        progress: Callable[[int], None] | None,
        frozen: FrozenToSave | None,
    ) -> None:
        self.publication, self.step = publication, publication.step
        self.rank, self.decide, self.progress = rank, decide, progress
        self.frozen = frozen or FrozenToSave("")
        self.format = PLAIN_FORMAT if frozen is None else FORMAT
        self.manifest: Manifest | None = None

    def save(
        self, pieces: Sequence[PieceToSave], state: Mapping[str, Any] | None, retention: Retention
    ) -> SavedCheckpoint:
        with closing(self.publication):
            try:
                prepared = self.agree(lambda: self.prepare(pieces, state))
                name = self.agree(lambda: self.begin(sum(prepared)) if self.rank == 0 else "")[0]
                self.publication.join(name)
                written = self.agree(self.write)
                done = self.agree(lambda: self.publish(written, retention) if self.rank == 0 else None)[0]
            except BaseException:
                if self.rank == 0:
                    self.publication.abandon()
                raise
        target = self.publication.target
        return SavedCheckpoint(target, self.step, done[0], tuple(done[1]), tuple(done[2]), self.manifest)

    def agree(self, attempt: Callable[[], Any]) -> list[Any]:
        """Return what an attempt returned on each rank, as `attempt_together` does; raise the same sentence on all."""
        return attempt_together(
            self.decide,
            attempt,
            lambda failure, answer: (
                f"checkpoint of step {self.step} in {self.publication.folder}: {failure}; {answer['outcome']}; "
                "those of other steps are as they were"
            ),
            lambda: {"outcome": self.publication.outcome},
        )

    def begin(self, needed: int) -> str:
        """Make room for the checkpoint; return what the other ranks need to write to it."""
        self.publication.remove_unused_beside({folder_of_shard(name) for name in self.frozen.files})
        return self.publication.begin(needed)

    def prepare(self, pieces: Sequence[PieceToSave], state: Mapping[str, Any] | None) -> int:
        """Lay out this rank's files; return how many bytes they need."""
        self.shards: list[tuple[str, list[ShardTensor]]] = []
        self.rows: list[list[Any]] = []
        self.state = b""
        needed = self.lay_out(pieces, SHARD_FOLDER) + self.lay_out(self.frozen.pieces, self.frozen.folder)
        if self.rank == 0:
            self.state = dump_strict_json(
                {**(state or {}), "format": self.format, "step": self.step},
                STATE_FILE,
                largest=LARGEST_JSON,
                deepest=DEEPEST_JSON,
            )
        return needed + len(self.state)

    def lay_out(self, pieces: Sequence[PieceToSave], folder: str) -> int:
        """Lay out this rank's files in a folder; return how many bytes they need."""
        tensors: list[ShardTensor] = []
        keys: set[str] = set()
        kept: list[tuple[PieceToSave, Region, ShardTensor]] = []
        for piece in pieces:
            where = normal_region(piece.where)
            key = piece_key(piece.name, piece.kind, where, piece.shape)
            while key in keys:
                key += "+"
            keys.add(key)
            tensor = ShardTensor(key, piece.dtype, piece_shape(piece.shape, where), piece.data)
            kept.append((piece, where, tensor))
            if where.numel:
                tensors.append(tensor)
        file_of: dict[str, str] = {}
        headers = 0
        for number, first in enumerate(range(0, len(tensors), MOST_KEYS)):
            some = sorted_for_shard(tensors[first : first + MOST_KEYS])
            name = shard_file_name(self.rank, number, folder)
            self.shards.append((name, some))
            headers += len(shard_header(some, self.metadata))
            file_of |= {tensor.key: name for tensor in some}
        for piece, where, tensor in kept:
            file = file_of.get(tensor.key, "") if where.numel else ""
            self.rows.append([piece.name, piece.kind, piece.dtype, list(piece.shape), file, tensor.key, *where])
        return headers + sum(tensor.bytes for tensor in tensors)

    @property
    def metadata(self) -> dict[str, str]:
        """Metadata of shards: `format` is what other libraries look for."""
        return {"format": "pt", "unipar": str(self.format), "step": str(self.step)}

    def write(self) -> dict[str, Any]:
        """Write this rank's files; return their sizes and hashes, and where each piece is."""
        files: dict[str, FileRecord] = {}
        for name, tensors in self.shards:
            files[name] = _named(name, partial(self.write_shard, name, tensors))
        if self.shards and self.rank:  # rank 0 flushes it when all have written
            _named(SHARD_FOLDER, self.publication.flush_shards)
        if self.rank == 0:
            files[STATE_FILE] = self.write_file(STATE_FILE, self.state)
        return {"files": files, "rows": self.rows}

    def write_shard(self, name: str, tensors: Sequence[ShardTensor]) -> FileRecord:
        """Write and flush one shard."""
        return write_tensors(HashedFile(self.publication.create(name), self.progress), tensors, self.metadata)

    def write_file(self, name: str, data: bytes) -> FileRecord:
        """Write and flush a small file."""

        def write() -> FileRecord:
            with HashedFile(self.publication.create(name)) as file:
                file.write(data)
                return file.finish()

        return _named(name, write)

    def publish(self, written: Sequence[Mapping[str, Any]], retention: Retention) -> tuple[int, list[int], list[str]]:
        """Publish what all ranks have written, and delete old checkpoints; return bytes, steps deleted and remarks."""
        manifest = merge_written(self.step, written)
        wrote = dict(manifest.files)
        saved = self.frozen.saved
        used = {piece.file for tensor in saved.values() for piece in tensor.pieces}
        of_earlier = {name: record for name, record in self.frozen.files.items() if name in used}
        manifest = self.manifest = replace(
            manifest, files={**of_earlier, **wrote}, tensors={**saved, **manifest.tensors}
        )
        for tensor in manifest.tensors.values():
            check_tiling(tensor, "what the ranks wrote")
        data = manifest.to_json()
        files = {**wrote, MANIFEST_FILE: self.write_file(MANIFEST_FILE, data)}
        self.publication.check_written(files)
        try:
            self.write_file(SEAL_FILE, seal_of_manifest(data))
        except CheckpointError:
            self.publication.withdraw()
            raise
        self.publication.publish()
        removed, remarks = remove_old_checkpoints(
            self.publication.folder, retention, self.step, self.publication.delete
        )
        self.publication.remove_replaced()
        self.publication.remove_unused_beside(manifest.folders_beside)
        return sum(record.bytes for record in wrote.values()), removed, [*self.publication.remarks, *remarks]


def merge_written(step: int, written: Sequence[Mapping[str, Any]]) -> Manifest:
    """Return the manifest of what all ranks wrote; raise CheckpointError if they contradict one another."""
    files: dict[str, FileRecord] = {}
    first_rank: dict[tuple[str, str], int] = {}
    described: dict[tuple[str, str], tuple[str, tuple[int, ...]]] = {}
    pieces: dict[tuple[str, str], list[StoredPiece]] = {}
    for rank, one in enumerate(written):
        files |= {name: FileRecord(*record) for name, record in one["files"].items()}
        for name, kind, dtype, shape, file, key, *numbers in one["rows"]:
            mine = (dtype, tuple(shape))
            theirs = described.setdefault((name, kind), mine)
            other = first_rank.setdefault((name, kind), rank)
            if mine != theirs:
                raise CheckpointError(
                    f"{name} ({kind}) is {theirs[0]} of shape {list(theirs[1])} on rank {other}, and {dtype} of shape "
                    f"{shape} on rank {rank}"
                )
            stored = pieces.setdefault((name, kind), [])
            if file:
                stored.append(StoredPiece(file, key, Region(*numbers)))
    tensors = {
        (name, kind): StoredTensor(name, kind, *described[name, kind], tuple(sorted(parts, key=lambda p: p.where)))
        for (name, kind), parts in pieces.items()
    }
    return Manifest(step, files, tensors)


def _named(name: str, attempt: Callable[[], _T]) -> _T:
    """Return what an attempt to write a file returns; an OSError becomes a sentence with the file's name."""
    try:
        return attempt()
    except OSError as e:
        raise CheckpointError(f"{name}: {e.strerror or e}") from e
