"""Saving the state of a run: pieces of all ranks, copied first where training is to go on meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor
from typing_extensions import Buffer

from unipar.backend import Piece, Region
from unipar.checkpoint.format.manifest import Manifest
from unipar.checkpoint.format.names import ITEM_BYTES
from unipar.checkpoint.frozen_weights import FrozenWeights, sums_of
from unipar.checkpoint.protocol.joint_attempts import attempt_together
from unipar.checkpoint.protocol.retention import Retention
from unipar.checkpoint.protocol.save_checkpoint import (
    FrozenToSave,
    PieceToSave,
    SavedCheckpoint,
    save_checkpoint,
)
from unipar.checkpoint.tensor_bytes import bytes_of, dtype_name
from unipar.distributed.device import has_own_memory
from unipar.distributed.meeting.text_rounds import Decide, open_rounds
from unipar.errors import CheckpointError
from unipar.utils.address import Address, Location
from unipar.utils.text import first_few

if TYPE_CHECKING:
    from unipar.distributed.world import World


GatheredState = tuple[Iterable[Piece], Mapping[str, Any]]
"""Pieces of state that a rank holds, and rank 0's contents of state.json."""


@dataclass(frozen=True)
class FinishedSave:
    """Checkpoint that was published, and how long training waited for it."""

    saved: SavedCheckpoint
    waited: float
    """Seconds in which this rank did not train."""

    seconds: float
    """Seconds from the copy to the publication."""


@final
class CheckpointSaver:
    """Saver of one rank; all ranks call its methods together."""

    def __init__(
        self,
        folder: Location,
        world: World,
        *,
        asynchronous: bool,
        trained: Collection[str] | None = None,
        mark: Callable[[str], None] = lambda phase: None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """`mark` reports phases of the heartbeat; `progress` is called with the bytes written so far, and their sum.

        `trained`: names of the parameters that are trained, if all others are to be saved once, beside the checkpoints.
        """
        self.frozen = FrozenWeights(trained)
        self.folder, self._world, self._asynchronous = folder, world, asynchronous
        self._mark, self._progress = mark, progress
        self._copies: dict[tuple[str, str, Region], Tensor] = {}
        self._save: _Save | None = None
        self._take_frozen: Callable[[Manifest | None], None] = _take_nothing
        """Callback for the contents of the checkpoint that is under way, once it is published."""

    def save(self, step: int, gather: Callable[[], GatheredState], retention: Retention) -> None:
        """Save what `gather` returns; asynchronously, return once it is copied.

        If it fails on one rank, or gives what a checkpoint cannot hold, all ranks raise the same CheckpointError.
        """
        assert self._save is None, "a save is under way"
        began = time.monotonic()
        self._mark("save")
        to_save: list[PieceToSave] = []
        unchanging: list[Piece] = []
        state: Mapping[str, Any] = {}

        def prepare() -> tuple[int, list[str]]:
            nonlocal state
            pieces, state = gather()
            for piece in pieces:
                if self.frozen.has(piece):
                    unchanging.append(piece)
                else:
                    to_save.append(self._piece(piece))
            return len(unchanging), self.frozen.changed(unchanging)

        of_ranks = self._together(step, "pieces", prepare)
        frozen, remark, self._take_frozen = None, "", _take_nothing
        if self.frozen.is_used:
            frozen, remark = self._settle_frozen(step, of_ranks, unchanging, to_save)
        to_save.sort(key=_place)  # the same state gives the same bytes
        self._world.synchronize()  # copies are asynchronous
        key = self._world.key("checkpoint")
        write = partial(self._write, step, to_save, dict(state), retention, key, frozen, remark)
        self._save = _Save(write, began)
        if self._asynchronous:
            self._save.start()
        elif isinstance(self.folder, Address):
            self._save.start()  # a request may take long, and this thread says meanwhile that the rank lives
            self._watch(self._save)
        else:
            self._save.run()
        self._save.waited = time.monotonic() - began

    def _together(self, step: int, what: str, attempt: Callable[[], Any]) -> list[Any]:
        """Return what an attempt returned on each rank, as `attempt_together` does, before anything is written."""
        return attempt_together(
            self._rounds(self._world.key(f"checkpoint {what}"), waits=True),
            attempt,
            lambda failure, answer: f"checkpoint of step {step} in {self.folder}: {failure}; nothing was written",
        )

    def _settle_frozen(
        self,
        step: int,
        of_ranks: list[Any],
        pieces: list[Piece],
        to_save: list[PieceToSave],
    ) -> tuple[FrozenToSave | None, str]:
        """Return what the checkpoint has beside it, and a remark; add to `to_save` the pieces that have changed."""
        settle = partial(self.frozen.settle, of_ranks)
        folder, changed = self._together(step, "frozen", lambda: settle() if self._world.rank == 0 else None)[0]
        self.frozen.give_up(changed)
        is_new, beside, sums = folder and not self.frozen.folder, list[PieceToSave](), dict[Any, int]()

        def copy() -> None:
            to_save.extend(self._piece(piece) for piece in pieces if piece.name in changed)
            if is_new:
                sums.update(sums_of(pieces))
                beside.extend(sorted((self._piece(piece, once=True) for piece in pieces), key=_place))

        self._together(step, "frozen pieces", copy)
        if is_new:
            self._take_frozen = partial(self.frozen.keep, folder, sums)
        remark = (
            f"{first_few(changed)}: changed, though not trained; saved in each checkpoint from now on"
            if changed
            else ""
        )
        if not folder:
            return None, remark
        return FrozenToSave(folder if is_new else "", beside, self.frozen.saved, self.frozen.files), remark

    def _write(
        self,
        step: int,
        pieces: list[PieceToSave],
        state: Mapping[str, Any],
        retention: Retention,
        key: str,
        frozen: FrozenToSave | None,
        remark: str,
    ) -> SavedCheckpoint:
        total = sum(p.where.numel * ITEM_BYTES[p.dtype] for p in (*pieces, *(frozen.pieces if frozen else ())))
        done = 0

        def advance(count: int) -> None:
            nonlocal done
            done += count
            if not self._asynchronous:
                self._mark("save")
            if self._progress is not None:
                self._progress(min(done, total), total)  # headers and small files are not in the sum

        saved = save_checkpoint(
            self.folder,
            step,
            pieces,
            state,
            rank=self._world.rank,
            decide=self._rounds(key),
            retention=retention,
            progress=advance,
            frozen=frozen,
        )
        return replace(saved, remarks=(*saved.remarks, *filter(None, [remark])))

    def _rounds(self, key: str, *, waits: bool = False) -> Decide:
        """Return a collective of all ranks; `waits`: training waits for it, which the heartbeat tells."""
        waiting = (lambda: self._mark("waiting")) if waits or not self._asynchronous else (lambda: None)
        return open_rounds(self._world, key, waiting)

    def finished(self) -> FinishedSave | None:
        """Return the result of a save that has ended, once; raise what made it fail; None while it runs."""
        save = self._save
        if save is None or save.running:
            return None
        self._save = None
        finished = save.result()
        self._take_frozen(finished.saved.manifest)
        return finished

    def wait(self) -> FinishedSave | None:
        """Wait for the save that is under way, and return its result; None if there is none."""
        save = self._save
        if save is None:
            return None
        began = time.monotonic()
        self._watch(save)
        save.waited += time.monotonic() - began
        return self.finished()

    def _watch(self, save: _Save) -> None:
        while save.running and save.thread is not None:
            self._mark("save")
            save.thread.join(0.2)

    def _piece(self, piece: Piece, *, once: bool = False) -> PieceToSave:
        """Return a piece with its elements; `once`: it is saved this once, so that its copy is not used again."""
        called = f"{piece.kind} of {piece.name}"
        dtype = dtype_name(piece.tensor, called)
        if piece.tensor.numel() != piece.where.numel:
            raise CheckpointError(f"{called}: {piece.tensor.numel():,} elements for a region of {piece.where.numel:,}")
        return PieceToSave(piece.name, piece.kind, dtype, tuple(piece.shape), piece.where, self._memory(piece, once))

    def _memory(self, piece: Piece, once: bool) -> Buffer | Callable[[], Buffer]:
        """Return the elements: a copy if training goes on, else the tensor's own when their turn comes."""
        t = piece.tensor.detach()
        if not self._asynchronous:
            return lambda: bytes_of(t.cpu().contiguous())
        key = (piece.name, piece.kind, piece.where)
        copy = self._copies.get(key)
        if copy is None or copy.dtype != t.dtype or copy.numel() != t.numel():
            pinned = has_own_memory(t.device)
            copy = torch.empty(t.numel(), dtype=t.dtype, pin_memory=pinned)
            if not once:
                self._copies[key] = copy
        copy.view(t.shape).copy_(t, non_blocking=True)
        return partial(bytes_of, copy)  # once the device has copied

    def close(self) -> None:
        """Forget the copies."""
        self._copies.clear()


def _take_nothing(manifest: Manifest | None) -> None:
    """Do nothing: the checkpoint writes nothing beside it."""


def _place(piece: PieceToSave) -> tuple[str, str, int]:
    return piece.name, piece.kind, piece.where.start


@final
class _Save:
    """One save; its error is kept until someone asks for the result."""

    def __init__(self, write: Callable[[], SavedCheckpoint], began: float) -> None:
        self._write, self._began, self._ended = write, began, began
        self._saved: SavedCheckpoint | None = None
        self._error: BaseException | None = None
        self.thread: threading.Thread | None = None
        self.waited = 0.0

    def run(self) -> None:
        """Write and publish it."""
        try:
            self._saved = self._write()
        except BaseException as e:  # raised where the result is asked for, also out of a thread
            self._error = e
        self._ended = time.monotonic()

    def start(self) -> None:
        """Run it in a thread."""
        self.thread = threading.Thread(target=self.run, name="unipar-checkpoint", daemon=True)
        self.thread.start()

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self.thread is not None and self.thread.is_alive()

    def result(self) -> FinishedSave:
        """Return what was saved, or raise what went wrong."""
        if self._error is not None:
            raise self._error
        assert self._saved is not None
        return FinishedSave(self._saved, self.waited, self._ended - self._began)
