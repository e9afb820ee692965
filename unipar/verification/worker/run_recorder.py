"""Recording of a run: what each step of an engine takes and returns, and the state of every tensor after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor, nn
from typing_extensions import override

from unipar.backend import Engine, Factor, LossFn, Mark, Micro, Piece, Step
from unipar.backend.engine import DelegatingEngine
from unipar.engines.fingerprint import TensorSketcher, fingerprint_batch, sketch_units, sketch_whole_tensor
from unipar.verification.worker.best_choices import BestChoices
from unipar.verification.worker.module_trace import DropoutDraws, StepTrace


class RunRecorder:
    """Record of all engines of a run, in the order of their steps: one engine, or one per part of the model."""

    def __init__(
        self,
        trace_at: int | None = None,
        arithmetic: Callable[[], AbstractContextManager[Any]] = nullcontext,
        *,
        shared: bool = False,
        masks: bool = False,
        held: bool = False,
        slots: bool = False,
        choices: BestChoices | None = None,
    ) -> None:
        """Record steps that run in `arithmetic`.

        `shared`: ranks share the work on the same samples; `masks`: dropout is on; `held`: each rank's weights are
        recorded, to be compared with those of other ranks; `slots`: each expert's part of a row is traced, which
        needs all experts on this rank; `choices`: what records, or decides, which experts routers choose.
        """
        self.engines: dict[str, Engine] = {}
        """Engines by the prefix of their parameter names; "" if there is only one."""

        self.steps: list[dict[str, Any]] = []
        """Loss, norm, rates and fingerprints of each step."""

        self.traced: list[dict[str, Any]] = []
        """Rows of the traced step."""

        self.states: list[dict[str, Tensor]] = []
        """Sketches of this rank's part of each tensor: before the first step, then after each step."""

        self.copies: list[dict[str, tuple[int, Tensor]]] = []
        """Size and sketch of each parameter, and of its state, that this rank keeps as one tensor, after each step, if
        ranks share work: copies of a whole parameter must stay the same."""

        self.held: list[dict[str, Tensor]] = []
        """Sketch of each region of a weight with which this rank computes, before the first step and after each."""

        self._trace_at, self._arithmetic, self._shared, self._masks = trace_at, arithmetic, shared, masks
        self._held, self._slots, self._choices = held, slots, choices
        self._sketches = TensorSketcher()

    def record_engine(self, prefix: str, engine: Engine) -> RecordingEngine:
        """Return the engine wrapped so that its steps are recorded."""
        self.engines[prefix] = engine
        return RecordingEngine(self, prefix, engine)

    def record_initial_state(self) -> None:
        """Record the state before the first step."""
        self._record_state()

    def pieces(self) -> Iterator[Piece]:
        """Yield this rank's pieces of the state that is compared: parameters and floating-point optimizer states."""
        for prefix, engine in self.engines.items():
            for piece in engine.pieces():
                if piece.kind != "buffer" and piece.tensor.is_floating_point():
                    yield replace(piece, name=prefix + piece.name)

    def _record_state(self) -> None:
        self.states.append(self._state())
        if self._held:
            self.held.append(self._held_weights())

    def _held_weights(self) -> dict[str, Tensor]:
        sketches: dict[str, Tensor] = {}
        for prefix, engine in self.engines.items():
            for piece in engine.held_weights():
                if piece.tensor.is_floating_point():
                    name, size = prefix + piece.name, int(torch.Size(piece.shape).numel())
                    place = "|".join(map(str, piece.where))
                    sketches[f"{name}|{place}"] = self._sketches.sketch_region(name, size, piece.where, piece.tensor)
        return sketches

    def _state(self) -> dict[str, Tensor]:
        sketches: dict[str, Tensor] = {}
        for piece in self.pieces():
            size, key = int(torch.Size(piece.shape).numel()), f"{piece.name}|{piece.kind}"
            sketch = self._sketches.sketch_region(piece.name, size, piece.where, piece.tensor)
            sketches[key] = sketches[key] + sketch if key in sketches else sketch  # a rank may hold several regions
            if self._trace_at is not None:
                for unit, part in sketch_units(self._sketches, piece.name, piece.shape, piece.where, piece.tensor):
                    key = f"{unit}|{piece.kind}"
                    sketches[key] = sketches[key] + part if key in sketches else part
        return sketches

    def buffers(self, *, share: bool = True) -> dict[str, Tensor]:
        """Return the floating-point buffers for which this rank speaks; all ranks call this, which shares them."""
        buffers: dict[str, Tensor] = {}
        for prefix, engine in self.engines.items():
            if share:
                engine.share_buffers()
            for piece in engine.pieces():
                if piece.kind == "buffer" and piece.tensor.is_floating_point():
                    buffers[prefix + piece.name] = piece.tensor.detach().flatten().cpu().clone()
        return buffers

    def _copies(self) -> dict[str, tuple[int, Tensor]]:
        copies: dict[str, tuple[int, Tensor]] = {}
        for prefix, engine in self.engines.items():
            for holding in engine.holdings():
                name, _, kind = holding.name.rpartition(".")
                if holding.category == "parameters":
                    name, kind = holding.name, "weight"
                elif holding.category != "optimizer" or kind == "step":
                    continue
                if holding.tensor.is_floating_point():
                    sketch = sketch_whole_tensor(self._sketches, prefix + name, holding.tensor)
                    copies[f"{prefix}{name}|{kind}"] = holding.tensor.numel(), sketch
        return copies

    def step(self, prefix: str, fn: LossFn, micros: Sequence[Micro], factor: Factor, mark: Mark) -> Step:
        """Run a step of the engine with this prefix, and record it."""
        sample_marks: list[str] = []
        masks: dict[int, list[str]] = {}
        choices = self._choices
        trace = StepTrace(slots=self._slots) if len(self.steps) + 1 == self._trace_at else None

        def recorded(model: nn.Module, batch: Any, number: int) -> Any:
            mark, draws = fingerprint_batch(batch), DropoutDraws(masks.setdefault(number, []))
            with (
                nullcontext() if trace is None else trace.record_modules(model, number),
                draws if self._masks else nullcontext(),
                nullcontext() if choices is None else choices.of_microbatch(model, len(self.steps) + 1, number),
            ):
                loss = fn(model, batch, number)  # a pipeline's stage leaves it by an exception, without a loss
            sample_marks.append(mark)
            if trace is not None:
                trace.record_loss(number, loss)
            return loss

        marks = [(fingerprint_batch(m.batch), m.scale) for m in micros]
        engine = self.engines[prefix]
        with self._arithmetic():
            out = engine.step(recorded, micros, factor, mark)
        if trace is not None:
            self.traced = trace.rows
        rates = engine.learning_rates()
        row = {"loss": float(out.loss), "norm": float(out.norm), "rates": rates, "given": marks, "seen": sample_marks}
        self.steps.append({**row, "prefix": prefix, "masks": masks})
        self._record_state()
        if self._shared:
            self.copies.append(self._copies())
        return out


@final
class RecordingEngine(DelegatingEngine):
    """Engine that passes each call to another engine and records its steps."""

    def __init__(self, recorder: RunRecorder, prefix: str, inner: Engine) -> None:
        super().__init__(inner)
        self._recorder, self._prefix = recorder, prefix

    @override
    def step(self, fn: LossFn, micros: Sequence[Micro], factor: Factor, mark: Mark) -> Step:
        return self._recorder.step(self._prefix, fn, micros, factor, mark)
