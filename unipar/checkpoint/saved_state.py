"""State of a checkpoint as engines read it: any region of any tensor, however it was cut when it was saved."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Self, final

import torch
from torch import Tensor
from typing_extensions import override

from unipar.backend import Read, Region
from unipar.backend.engine import KIND_OF_AVERAGES
from unipar.checkpoint.format.manifest import Manifest, StoredPiece, StoredTensor
from unipar.checkpoint.format.names import ITEM_BYTES, normal_region
from unipar.checkpoint.format.shard_file import ShardReader
from unipar.checkpoint.overlaps import Overlap, find_overlaps
from unipar.checkpoint.tensor_bytes import DTYPE_OF_NAME, bytes_of
from unipar.errors import CheckpointError
from unipar.utils.address import Location
from unipar.utils.text import first_few

_LONG_RUN = 2**16
"""Bytes of a run from which each is read by itself; shorter ones are read together with what lies between them."""

_SPAN = 2**26
"""Bytes that are read at once where runs are short."""


@final
class SavedState(Read):
    """A `Read` over one checkpoint whose files were verified; it reads only what it is asked for."""

    def __init__(self, folder: Location, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        self.bytes_read = 0
        """Bytes of tensors that were read so far."""

        self.on_read: Callable[[int], None] = lambda read: None
        """Function that is called with `bytes_read` after each read."""

        self.weights_only: tuple[str, ...] = ()
        """Beginnings of the names of parameters of which engines are to find the weight alone."""

        self._kinds: dict[str, set[str]] = {}
        for name, kind in manifest.tensors:
            self._kinds.setdefault(name, set()).add(kind)
        self._shards: dict[str, ShardReader] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        for shard in self._shards.values():
            shard.close()
        self._shards.clear()

    @property
    def tensors(self) -> Mapping[tuple[str, str], StoredTensor]:
        """Tensors of the checkpoint by name and kind."""
        return self.manifest.tensors

    @override
    def kinds(self, name: str) -> set[str]:
        """Return what is saved for a parameter: `weight` and the optimizer's keys."""
        kinds = self._kinds.get(name, set()) - {"buffer", KIND_OF_AVERAGES}
        return kinds & {"weight"} if name.startswith(self.weights_only) else kinds

    @override
    def has(self, name: str, kind: str) -> bool:
        return (name, kind) in self.manifest.tensors

    @override
    def shape(self, name: str, kind: str) -> tuple[int, ...]:
        """Return the shape of a tensor of the state as a whole."""
        return self._tensor(name, kind).shape

    def element_bytes(self, name: str, kind: str) -> int:
        """Return how many bytes an element of a saved tensor has; 0 if there is none."""
        tensor = self.manifest.tensors.get((name, kind))
        return 0 if tensor is None else ITEM_BYTES[tensor.dtype]

    @override
    def __call__(self, name: str, kind: str, where: Region) -> Tensor:
        stored, where = self._tensor(name, kind), normal_region(where)
        out = torch.empty(where.numel, dtype=DTYPE_OF_NAME[stored.dtype])
        self._fill_region(out, stored, where)
        return out

    @override
    def fill(self, out: Tensor, name: str, kind: str, where: Region) -> None:
        stored = self._tensor(name, kind)
        if out.device.type == "cpu" and out.dtype == DTYPE_OF_NAME[stored.dtype] and out.is_contiguous():
            self._fill_region(out.detach().view(-1), stored, normal_region(where))  # read to where it is to be
        else:
            super().fill(out, name, kind, where)

    def _fill_region(self, out: Tensor, stored: StoredTensor, where: Region) -> None:
        filled = 0
        for piece in stored.pieces:
            for overlap in find_overlaps(where, piece.where):
                self._fill(out, piece, overlap)
                filled += overlap.numel
        if filled != where.numel:
            raise CheckpointError(
                f"{self.folder}: {stored} has {filled:,} of the {where.numel:,} elements that are asked for"
            )

    def whole(self, name: str, kind: str) -> Tensor:
        """Return a tensor of the state as a whole."""
        shape = self.shape(name, kind)
        return self(name, kind, Region(0, torch.Size(shape).numel())).view(shape)

    def _tensor(self, name: str, kind: str) -> StoredTensor:
        tensor = self.manifest.tensors.get((name, kind))
        if tensor is None:
            raise CheckpointError(f"{self.folder} has no {kind} of {name}")
        return tensor

    def _fill(self, out: Tensor, piece: StoredPiece, overlap: Overlap) -> None:
        size = out.element_size()
        if overlap.runs == 1 or overlap.length * size >= _LONG_RUN:
            for run in range(overlap.runs):
                first = overlap.wanted + run * overlap.wanted_stride
                saved = overlap.saved + run * overlap.saved_stride
                self._read(piece, saved, out[first : first + overlap.length])
            return
        many = max(1, _SPAN // (overlap.saved_stride * size))
        for run in range(0, overlap.runs, many):
            runs = min(many, overlap.runs - run)
            span = torch.empty((runs - 1) * overlap.saved_stride + overlap.length, dtype=out.dtype)
            self._read(piece, overlap.saved + run * overlap.saved_stride, span)
            wanted = Region(overlap.wanted + run * overlap.wanted_stride, overlap.length, overlap.wanted_stride, runs)
            saved = Region(0, overlap.length, overlap.saved_stride, runs)
            wanted.of(out).copy_(saved.of(span))

    def _read(self, piece: StoredPiece, first: int, into: Tensor) -> None:
        """Fill a contiguous tensor with a piece's elements from `first` on."""
        if piece.file not in self._shards:
            self._shards[piece.file] = ShardReader(self.folder, piece.file)
        memory = bytes_of(into)
        self._shards[piece.file].read_tensor_into(piece.key, first * into.element_size(), memory)
        self.bytes_read += memory.nbytes
        self.on_read(self.bytes_read)


def refuse_other_model(
    wanted: Mapping[tuple[str, str], tuple[Sequence[int], str]],
    there: Mapping[tuple[str, str], StoredTensor],
    called: str,
) -> None:
    """Raise CheckpointError if names, shapes or dtypes of a model's tensors are not those of a checkpoint."""
    _refuse_names(wanted.keys() - there.keys(), called, "lacks", "which the model has")
    _refuse_names(there.keys() - wanted.keys(), called, "has", "which the model lacks")
    for key, (shape, dtype) in sorted(wanted.items()):
        stored = there[key]
        if tuple(shape) != stored.shape:
            raise CheckpointError(f"{called}: {stored} has the shape {list(stored.shape)}, in the model {list(shape)}")
        if dtype != stored.dtype:
            raise CheckpointError(f"{called}: {stored} is {stored.dtype}, in the model {dtype}")


def _refuse_names(names: Iterable[tuple[str, str]], called: str, verb: str, words: str) -> None:
    ordered = sorted(names)
    if ordered:
        shown = first_few([name if kind == "weight" else f"{name} ({kind})" for name, kind in ordered], most=4)
        raise CheckpointError(f"{called} {verb} {shown}, {words}: it is of another model")
