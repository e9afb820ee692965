"""Saving the state of a run: pieces of all ranks, copied first where training is to go on meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor
from typing_extensions import Buffer

from unipar.backend import Piece, Region
from unipar.checkpoint.format.names import ITEM_BYTES
from unipar.checkpoint.protocol.joint_attempts import attempt_together
from unipar.checkpoint.protocol.retention import Retention
from unipar.checkpoint.protocol.save_checkpoint import PieceToSave, SavedCheckpoint, save_checkpoint
from unipar.checkpoint.tensor_bytes import bytes_of, dtype_name
from unipar.distributed.device import has_own_memory
from unipar.distributed.meeting.text_rounds import Decide, open_rounds
from unipar.errors import CheckpointError
from unipar.utils.address import Address, Location

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
        mark: Callable[[str], None] = lambda phase: None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """`mark` reports phases of the heartbeat; `progress` is called with the bytes written so far, and their sum."""
        self.folder, self._world, self._asynchronous = folder, world, asynchronous
        self._mark, self._progress = mark, progress
        self._copies: dict[tuple[str, str, Region], Tensor] = {}
        self._save: _Save | None = None

    def save(self, step: int, gather: Callable[[], GatheredState], retention: Retention) -> None:
        """Save what `gather` returns; asynchronously, return once it is copied.

        If it fails on one rank, or gives what a checkpoint cannot hold, all ranks raise the same CheckpointError.
        """
        assert self._save is None, "a save is under way"
        began = time.monotonic()
        self._mark("save")
        to_save: list[PieceToSave] = []
        state: Mapping[str, Any] = {}

        def prepare() -> None:
            nonlocal state
            pieces, state = gather()
            to_save.extend(sorted(map(self._piece, pieces), key=_place))  # the same state gives the same bytes

        attempt_together(
            self._rounds(self._world.key("checkpoint pieces"), waits=True),
            prepare,
            lambda failure, answer: f"checkpoint of step {step} in {self.folder}: {failure}; nothing was written",
        )
        self._world.synchronize()  # copies are asynchronous
        total = sum(p.where.numel * ITEM_BYTES[p.dtype] for p in to_save)
        key = self._world.key("checkpoint")
        self._save = _Save(partial(self._write, step, to_save, dict(state), retention, key, total), began)
        if self._asynchronous:
            self._save.start()
        elif isinstance(self.folder, Address):
            self._save.start()  # a request may take long, and this thread says meanwhile that the rank lives
            self._watch(self._save)
        else:
            self._save.run()
        self._save.waited = time.monotonic() - began

    def _write(
        self,
        step: int,
        pieces: list[PieceToSave],
        state: Mapping[str, Any],
        retention: Retention,
        key: str,
        total: int,
    ) -> SavedCheckpoint:
        done = 0

        def advance(count: int) -> None:
            nonlocal done
            done += count
            if not self._asynchronous:
                self._mark("save")
            if self._progress is not None:
                self._progress(min(done, total), total)  # headers and small files are not in the sum

        return save_checkpoint(
            self.folder,
            step,
            pieces,
            state,
            rank=self._world.rank,
            decide=self._rounds(key),
            retention=retention,
            progress=advance,
        )

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
        return save.result()

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

    def _piece(self, piece: Piece) -> PieceToSave:
        called = f"{piece.kind} of {piece.name}"
        dtype = dtype_name(piece.tensor, called)
        if piece.tensor.numel() != piece.where.numel:
            raise CheckpointError(f"{called}: {piece.tensor.numel():,} elements for a region of {piece.where.numel:,}")
        return PieceToSave(piece.name, piece.kind, dtype, tuple(piece.shape), piece.where, self._memory(piece))

    def _memory(self, piece: Piece) -> Buffer | Callable[[], Buffer]:
        """Return the elements: a copy if training goes on, else the tensor's own when their turn comes."""
        t = piece.tensor.detach()
        if not self._asynchronous:
            return lambda: bytes_of(t.cpu().contiguous())
        key = (piece.name, piece.kind, piece.where)
        copy = self._copies.get(key)
        if copy is None or copy.dtype != t.dtype or copy.numel() != t.numel():
            pinned = has_own_memory(t.device)
            copy = self._copies[key] = torch.empty(t.numel(), dtype=t.dtype, pin_memory=pinned)
        copy.view(t.shape).copy_(t, non_blocking=True)
        return partial(bytes_of, copy)  # once the device has copied

    def close(self) -> None:
        """Forget the copies."""
        self._copies.clear()


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
