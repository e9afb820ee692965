"""`BatchRecord`: the batches that a script's loaders give, and whether an epoch repeats the one before."""

from __future__ import annotations

from typing import Any, Final, final

import torch

from unipar.observing.process.script_checks import digest_batch, first_dimension

FIRST_BATCHES: Final = 3
"""Number of first batches of a training, or of an epoch, that are compared."""


@final
class BatchRecord:
    """Digests of the first batches of the training, and of each epoch of a loader that shuffles."""

    def __init__(self) -> None:
        self.first: list[int] = []
        """Digests of the training's first batches."""

        self.dimension: int | None = None
        """First dimension of the first tensor in a batch."""

        self._epochs: dict[int, list[list[int]]] = {}
        self._epoch: list[list[int]] = []

    def begin_epoch(self, loader: Any) -> None:
        """Note that the script iterates over a loader anew, unless it evaluates: then its epoch goes on after it."""
        if not torch.is_grad_enabled():
            return
        shuffles = bool(getattr(loader.sampler, "shuffle", False))  # an attribute of samplers for several ranks
        self._epoch = self._epochs.setdefault(id(loader.sampler), []) if shuffles else []
        if shuffles:
            self._epoch.append([])

    def add(self, batch: Any) -> bool:
        """Note a batch; return whether this epoch's first batches are those of the one before."""
        epoch = self._epoch[-1] if self._epoch and len(self._epoch[-1]) < FIRST_BATCHES else None
        if self.dimension is None:
            self.dimension = first_dimension(batch)
        if (len(self.first) >= FIRST_BATCHES and epoch is None) or (digest := digest_batch(batch)) is None:
            return False
        if len(self.first) < FIRST_BATCHES:
            self.first.append(digest)
        if epoch is None:
            return False
        epoch.append(digest)
        return len(epoch) == FIRST_BATCHES and self._epoch[-2:-1] == [epoch]
