"""An engine that is watched: what each step was given, what it gave, and what became of every tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor, nn
from typing_extensions import override

from unipar.backend import Engine, Fn, Mark, Micro, Piece, Step
from unipar.backend.engine import DelegatingEngine
from unipar.training.fingerprint import TensorSketcher, fingerprint_batch
from unipar.verification.worker.trace import StepTrace


class RunRecorder:
    """What all engines of a run did, in the order in which they did it: one of a model, or one of each of its parts."""

    def __init__(self, trace_at: int | None = None) -> None:
        self.engines: dict[str, Engine] = {}
        """By what their names begin with: nothing, where there is one."""

        self.steps: list[dict[str, Any]] = []
        self.traced: list[dict[str, Any]] = []
        self.states: list[dict[str, Tensor]] = []
        """Before the first step, then after each: a sketch of what this rank holds of each tensor."""

        self._trace_at = trace_at
        self._sketches = TensorSketcher()

    def record_engine(self, prefix: str, engine: Engine) -> RecordingEngine:
        self.engines[prefix] = engine
        return RecordingEngine(self, prefix, engine)

    def record_initial_state(self) -> None:
        """Before the first step."""
        self.states.append(self._state())

    def pieces(self) -> Iterator[Piece]:
        """What this rank holds of the state that is compared."""
        for prefix, engine in self.engines.items():
            for piece in engine.pieces():
                if piece.kind != "buffer" and piece.tensor.is_floating_point():
                    yield replace(piece, name=prefix + piece.name)

    def _state(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for piece in self.pieces():
            size = int(torch.Size(piece.shape).numel())
            found[f"{piece.name}|{piece.kind}"] = self._sketches.sketch_range(
                piece.name, size, piece.where, piece.tensor
            )
        return found

    def step(self, prefix: str, fn: Fn, micros: Sequence[Micro], factor: float, mark: Mark) -> Step:
        seen: list[str] = []
        trace = StepTrace() if len(self.steps) + 1 == self._trace_at else None

        def watched(model: nn.Module, batch: Any) -> Any:
            call = len(seen)
            seen.append(fingerprint_batch(batch))
            if trace is None:
                return fn(model, batch)
            with trace.record_modules(model, call):
                return fn(model, batch)

        given = [(fingerprint_batch(m.batch), m.scale) for m in micros]
        engine = self.engines[prefix]
        out = engine.step(watched, micros, factor, mark)
        if trace is not None:
            self.traced = trace.rows
        rates = engine.learning_rates()
        row = {"loss": float(out.loss), "norm": float(out.norm), "rates": rates, "given": given, "seen": seen}
        self.steps.append({**row, "prefix": prefix})
        self.states.append(self._state())
        return out


@final
class RecordingEngine(DelegatingEngine):
    """Writes down what the engine within does."""

    def __init__(self, notebook: RunRecorder, prefix: str, inner: Engine) -> None:
        super().__init__(inner)
        self._notebook, self._prefix = notebook, prefix

    @override
    def step(self, fn: Fn, micros: Sequence[Micro], factor: float, mark: Mark) -> Step:
        return self._notebook.step(self._prefix, fn, micros, factor, mark)
