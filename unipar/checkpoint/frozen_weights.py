"""Weights that are not trained, saved once beside all checkpoints of a run, and a check that they have not changed."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final, final

import torch
from torch import Tensor

from unipar.backend import Piece, Region
from unipar.checkpoint.format.manifest import FileRecord, Manifest, StoredTensor, is_kept_beside
from unipar.checkpoint.format.names import FROZEN_PREFIX, is_beside

_CHUNK: Final = 2**18
"""Numbers of eight bytes that are added up at a time."""

_ROTATION: Final = 0x1E3779B97F4A7C15
"""Odd number by which the sum of the chunks before is multiplied."""

_Key = tuple[str, Region]


@final
class FrozenWeights:
    """Frozen weights of one rank: what is saved of them, and which have changed since; all ranks go in step."""

    def __init__(self, trained: Collection[str] | None) -> None:
        """`trained`: names of the parameters that are trained; None: no weight is kept beside the checkpoints."""
        self._trained = trained
        self._sums: dict[_Key, int] = {}
        """Sums of this rank's pieces, as they are in the files."""

        self._changing: set[str] = set()
        """Names of weights that have changed since they were saved, although they are not trained."""

        self.folder = ""
        """Name of the folder with the files, once there is one."""

        self.saved: dict[tuple[str, str], StoredTensor] = {}
        """Tensors in the files; on rank 0."""

        self.files: Mapping[str, FileRecord] = {}
        """Sizes and hashes of the files; on rank 0."""

    @property
    def is_used(self) -> bool:
        """Whether weights that are not trained are kept beside the checkpoints."""
        return self._trained is not None

    def has(self, piece: Piece) -> bool:
        """Return whether a piece is of a weight that is kept beside the checkpoints."""
        return (
            self._trained is not None
            and piece.kind == "weight"
            and piece.name not in self._trained
            and piece.name not in self._changing
            and 0 not in piece.shape
        )

    def changed(self, pieces: Iterable[Piece]) -> list[str]:
        """Return the names of weights of which a piece on this rank is not what the files have."""
        if not self.folder:
            return []
        return sorted({name for (name, where), now in sums_of(pieces).items() if self._sums.get((name, where)) != now})

    def settle(self, of_ranks: Sequence[tuple[int, Sequence[str]]]) -> tuple[str, list[str]]:
        """Return the name of the folder for frozen weights, "" if there are none, and the names that have changed.

        Rank 0 calls this with the number of pieces and the changed names of each rank.
        """
        changed = sorted({name for _, names in of_ranks for name in names})
        if self.folder:
            left = self.saved.keys() - {(name, "weight") for name in changed}
            return self.folder if left else "", changed
        any_frozen = any(count for count, _ in of_ranks)
        return f"{FROZEN_PREFIX}{secrets.token_hex(4)}" if any_frozen else "", changed

    def give_up(self, changed: Iterable[str]) -> None:
        """Keep these weights in each checkpoint from now on."""
        for name in changed:
            self._changing.add(name)
            self.saved.pop((name, "weight"), None)

    def keep(self, folder: str, sums: Mapping[_Key, int], manifest: Manifest | None) -> None:
        """Take note of what a checkpoint has written to the folder."""
        self.folder, self._sums = folder, dict(sums)
        if manifest is not None:
            self._take_tensors(manifest)

    def go_on_from(self, manifest: Manifest, pieces: Iterable[Piece]) -> None:
        """Go on with the files of a checkpoint in the same folder, from which these pieces have just been read."""
        folders = sorted(manifest.folders_beside)
        if self._trained is None or len(folders) != 1:
            return
        self._take_tensors(manifest)
        self.folder = folders[0]
        mine = [piece for piece in pieces if self.has(piece)]
        self._changing |= {piece.name for piece in mine if (piece.name, "weight") not in self.saved}
        self._sums = sums_of(piece for piece in mine if self.has(piece))

    def _take_tensors(self, manifest: Manifest) -> None:
        self.saved = {key: tensor for key, tensor in manifest.tensors.items() if is_kept_beside(tensor)}
        self.files = {name: record for name, record in manifest.files.items() if is_beside(name)}


def sums_of(pieces: Iterable[Piece]) -> dict[_Key, int]:
    """Return checksums of pieces by name and region, computed where the pieces are.

    Another value of any byte changes a sum, but for one chance in 2**63.
    """
    of_device: dict[torch.device, _Sum] = {}
    sums: dict[_Key, int] = {}
    for piece in pieces:
        device = piece.tensor.device
        if device not in of_device:
            of_device[device] = _Sum(device)
        sums[piece.name, piece.where] = of_device[device].of(piece.tensor)
    return sums


@final
class _Sum:
    """Sum of numbers of eight bytes, each multiplied by an odd number that was drawn, on one device."""

    def __init__(self, device: torch.device) -> None:
        draw = torch.Generator().manual_seed(0)
        self._factors = torch.randint(-(2**62), 2**62, (_CHUNK,), generator=draw).mul_(2).add_(1).to(device)
        self._products = torch.empty_like(self._factors)

    def of(self, t: Tensor) -> int:
        """Return the sum over the bytes of a tensor."""
        data: Any = t.detach().contiguous().view(-1).view(torch.uint8)
        total = torch.zeros((), dtype=torch.int64, device=data.device)
        for part in data.split(8 * _CHUNK):
            words = self._words(part)
            products = torch.mul(words, self._factors[: len(words)], out=self._products[: len(words)])
            total = total * _ROTATION + products.sum()
        return int(total)

    def _words(self, part: Tensor) -> Tensor:
        """Return bytes as numbers of eight: their own memory, or a copy that is filled up with zeros."""
        if len(part) % 8 == 0 and part.storage_offset() % 8 == 0:
            return part.view(torch.int64)
        words = torch.zeros(-(-len(part) // 8), dtype=torch.int64, device=part.device)
        words.view(torch.uint8)[: len(part)] = part
        return words
