"""An engine that is watched: what each step was given, what it gave, and what became of every tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from typing_extensions import override

from unipar.backend import Engine, Fn, Mark, Micro, Piece, Read, Step
from unipar.proof.digest import Sketches, fingerprint
from unipar.proof.trace import Trace


@final
class Watched(Engine):
    """Around another engine, which does all the work."""

    def __init__(self, inner: Engine, trace_at: int | None = None) -> None:
        self.inner = inner
        self.steps: list[dict[str, Any]] = []
        self.traced: list[dict[str, Any]] = []
        self._trace_at = trace_at
        self._sketches = Sketches()
        self.states: list[dict[str, Tensor]] = [self._state()]
        """Before the first step, then after each: a sketch of what this rank holds of each tensor."""

        self._seen: list[str] = []

    @override
    def step(self, fn: Fn, micros: Sequence[Micro], factor: float, mark: Mark) -> Step:
        given = [(fingerprint(m.batch), m.scale) for m in micros]
        self._seen = []
        number = len(self.steps) + 1
        trace = Trace() if number == self._trace_at else None

        def watched(model: nn.Module, batch: Any) -> Any:
            call = len(self._seen)
            self._seen.append(fingerprint(batch))
            if trace is None:
                return fn(model, batch)
            with trace.on(model, call):
                return fn(model, batch)

        out = self.inner.step(watched, micros, factor, mark)
        if trace is not None:
            self.traced = trace.rows
        self.steps.append(
            {
                "loss": float(out.loss),
                "norm": float(out.norm),
                "rates": self.inner.rated(),
                "given": given,
                "seen": self._seen,
            }
        )
        self.states.append(self._state())
        return out

    def _state(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for piece in self.inner.pieces():
            if piece.kind == "buffer" or not piece.tensor.is_floating_point():
                continue
            size = int(torch.Size(piece.shape).numel())
            found[f"{piece.name}|{piece.kind}"] = self._sketches.of(piece.name, size, piece.where, piece.tensor)
        return found

    @override
    def rated(self) -> list[float]:
        return self.inner.rated()

    @override
    def evaluate(self, fn: Fn, batch: Any) -> Any:
        return self.inner.evaluate(fn, batch)

    @override
    def pieces(self) -> Iterator[Piece]:
        return self.inner.pieces()

    @override
    def restore(self, read: Read) -> None:
        self.inner.restore(read)

    @override
    def close(self) -> None:
        self.inner.close()
