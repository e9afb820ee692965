"""`AveragingEngine`: moving averages of the weights that another engine's rank keeps (`train.ema`)."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple, final

import torch
from torch import Tensor
from typing_extensions import override

from unipar.backend import Engine, Factor, Holding, LossFn, Mark, Micro, Piece, Read, Region, Step
from unipar.backend.engine import KIND_OF_AVERAGES, DelegatingEngine
from unipar.config.sections.train import Ema
from unipar.engines.averages.arithmetic import Pair, exchange, move_towards
from unipar.errors import TaskError

_STEPS: Final = "ema steps"
_UPDATES: Final = "ema updates"
_IN_PLACE: Final = (
    "the model has the averages of train.ema in place of its weights: do this outside of `with run.averaged():` (an "
    "error inside it leaves them there)"
)


class _Average(NamedTuple):
    """Average of a region of a weight."""

    shape: tuple[int, ...]
    """Shape of the weight as a whole."""

    tensor: Tensor


@final
class AveragingEngine(DelegatingEngine):
    """Engine that averages, after the steps of another one, each region of a trained weight that its rank keeps.

    Averages begin as the weights, also of a checkpoint that has no averages. Buffers are not averaged: an evaluation
    takes them as they are.
    """

    def __init__(self, inner: Engine, settings: Ema) -> None:
        super().__init__(inner)
        self._settings = settings
        self._steps: int | Tensor = 0
        self._updates: int | Tensor = 0
        self._averages = {
            (piece.name, piece.where): _Average(piece.shape, _first_average(piece))
            for piece in self.inner.full_weights()
        }
        self._in_place = False

    @override
    def step(self, fn: LossFn, micros: Sequence[Micro], factor: Factor, mark: Mark) -> Step:
        if self._in_place:
            raise TaskError(f"run.step(): {_IN_PLACE}")
        out = self.inner.step(fn, micros, factor, mark)
        if isinstance(out.skipped, Tensor) and self._settings.every == 1:
            self._update_unless(out.skipped)
        elif not out.skipped:  # with `every` the host has to know which update is due
            self._steps += 1
            if self._steps % self._settings.every == 0:
                self._updates += 1
                move_towards(self._pairs(), 1.0 - self._settings.decay_at(int(self._updates)))
        return out

    def _update_unless(self, skipped: Tensor) -> None:
        """Update averages unless the step was skipped, which the host does not wait to know."""
        self._steps, self._updates = self._steps + ~skipped, self._updates + ~skipped
        settings, update = self._settings, self._updates.double()
        share = 1.0 - (update / (update + settings.warmup)).clamp(max=settings.decay)
        move_towards(self._pairs(), share.masked_fill(skipped, 0.0).float())

    @override
    @contextmanager
    def averages_in_place(self) -> Generator[None]:
        if self._in_place:
            yield
            return
        self._exchange()
        yield  # an error leaves averages in place: other ranks may not come to put the weights back
        self._exchange()

    @override
    def pieces(self) -> Iterator[Piece]:
        mine: set[tuple[str, Region]] = set()
        for piece in self.inner.pieces():
            if piece.kind == "weight":
                mine.add((piece.name, piece.where))
            yield piece
        for (name, where), average in self._averages.items():
            if (name, where) in mine:  # else another rank yields its copy
                yield Piece(name, KIND_OF_AVERAGES, average.shape, where, average.tensor)

    @override
    def unsaved_values(self) -> Iterator[str]:
        if self._in_place:
            yield _IN_PLACE
        yield from self.inner.unsaved_values()

    @override
    @torch.no_grad()
    def restore(self, read: Read) -> None:
        self.inner.restore(read)
        self._steps = self._updates = 0
        for piece in self.inner.full_weights():
            average = self._averages[piece.name, piece.where].tensor
            if read.has(piece.name, KIND_OF_AVERAGES):
                read.fill(average, piece.name, KIND_OF_AVERAGES, piece.where)
            else:
                average.copy_(piece.tensor)

    @override
    def counters(self) -> dict[str, float]:
        return self.inner.counters() | {_STEPS: int(self._steps), _UPDATES: int(self._updates)}

    @override
    def restore_counters(self, saved: Mapping[str, float]) -> None:
        self._steps, self._updates = int(saved.get(_STEPS, 0)), int(saved.get(_UPDATES, 0))
        self.inner.restore_counters(without_counts(saved))

    @override
    def holdings(self) -> Iterator[Holding]:
        yield from self.inner.holdings()
        for (name, _), average in self._averages.items():
            yield Holding("averages", name, average.tensor)

    def _pairs(self) -> Iterator[Pair]:
        for piece in self.inner.full_weights():
            yield self._averages[piece.name, piece.where].tensor, piece.tensor

    def _exchange(self) -> None:
        """Give weights the values of their averages, and the other way about; called twice, all is as before."""
        exchange(self._pairs())
        self._in_place = not self._in_place
        self.inner.use_full_weights()


def with_averages(engine: Engine, settings: Ema | None) -> Engine:
    """Return the engine, with averages of its weights if there are settings for them."""
    return engine if settings is None else AveragingEngine(engine, settings)


def without_counts(saved: Mapping[str, float]) -> dict[str, float]:
    """Return an engine's numbers without those that `AveragingEngine` has added."""
    return {key: value for key, value in saved.items() if key not in (_STEPS, _UPDATES)}


@torch.no_grad()
def _first_average(weight: Piece) -> Tensor:
    """Return a weight's average before the first step, a copy; raise TaskError if its dtype would lose updates."""
    if weight.tensor.dtype.itemsize < torch.float32.itemsize:
        raise TaskError(
            f"train.ema is not available here: {weight.name} is updated in {str(weight.tensor.dtype)[6:]}, in which a "
            "thousandth of a distance is lost; leave train.ema out, or use bf16-master in a backend with fp32 masters"
        )
    return weight.tensor.clone(memory_format=torch.contiguous_format)
