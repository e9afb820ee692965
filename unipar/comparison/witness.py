"""Record of what a rank trains: initial values, samples of each step, precision."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from typing_extensions import override

from unipar.backend import Engine, Factor, LossFn, Mark, Micro, Step
from unipar.backend.engine import DelegatingEngine
from unipar.data.order import MicrobatchPlan, SampleKey
from unipar.data.stream_loader import StreamLoader
from unipar.engines.fingerprint import fingerprint_batch, hash_sample_keys, hash_tensor_region
from unipar.model.fp8_linears import fp8_linears_of
from unipar.results.same_training import RankMarks, rank_marks_path
from unipar.training.training_run import TrainingRun
from unipar.utils.text import short_dtype

MATRIX_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "convolution"})
"""Operations of PyTorch whose dtype is the precision in which a model is computed."""


@final
class MarksRecorder:
    """Recorder of a rank's training marks, from before the first step on.

    After `stop_fingerprinting` it records only the numbers of the samples.
    """

    def __init__(self, run: TrainingRun) -> None:
        self._run = run
        self._values: dict[str, int] = {}
        self._weight_dtypes: set[str] = set()
        frozen = set(_frozen_piece_names(run))  # constant, so libraries may keep them in the precision of compute
        for piece in run.pieces():
            if piece.kind == "weight" and piece.name not in frozen:
                self._values[piece.name] = self._values.get(piece.name, 0) + hash_tensor_region(
                    piece.tensor, piece.where
                )
                self._weight_dtypes.add(short_dtype(piece.tensor.dtype))
        self._compute_dtypes: set[str] = set()
        self._batches: list[list[str]] = []
        self._samples: list[tuple[int, int]] = []
        self._keys: list[list[SampleKey]] = []
        self._engines: dict[str, Engine] = {name: part.engine for name, part in run.parts.items()}
        if not run.config.model.compile:  # a compiled model must not run under a dispatch mode
            for part in run.parts.values():
                part.engine = _ObservedEngine(part.engine, run.device.type, self._compute_dtypes)
        self._close = True
        run.on_batches(self._note)

    def _note(self, read: Sequence[tuple[Any, MicrobatchPlan]]) -> None:
        self._keys.append([key for _, plan in read if plan.weight for key in plan.keys])
        if self._close:
            self._batches.append([fingerprint_batch(batch) for batch, plan in read if plan.weight])

    def stop_fingerprinting(self) -> None:
        """Stop fingerprinting batches and dtypes, because the following steps are timed."""
        self._close = False
        for name, part in self._run.parts.items():
            part.engine = self._engines[name]

    def write(self, folder: Path) -> None:
        """Write all marks so far."""
        self._samples += [(len(keys), hash_sample_keys(keys)) for keys in self._keys]
        self._keys.clear()
        loader = self._run.loader
        is_split = isinstance(loader, StreamLoader) and not loader.whole
        marks = RankMarks(
            values=self._values,
            kept=sorted(self._weight_dtypes),
            computed=sorted(self._compute_dtypes),
            batches=self._batches,
            samples=self._samples,
            readers=self._run.world.data_size if is_split else 0,
            total=self._run.sizes.total,
            precision=self._run.config.train.precision,
            leads=self._run.world.leads,
            fp8="; ".join(
                fp8.describe() for part in self._run.parts.values() if (fp8 := fp8_linears_of(part.module)) is not None
            ),
        )
        rank_marks_path(folder, self._run.rank).write_text(json.dumps(marks), encoding="utf-8")


def _frozen_piece_names(run: TrainingRun) -> Iterator[str]:
    """Yield the names of pieces whose parameters are frozen."""
    for part in run.parts.values():
        before = f"{part.name}." if len(run.parts) > 1 else ""
        yield from (before + name for name, p in part.module.named_parameters() if not p.requires_grad)


@final
class _ObservedEngine(DelegatingEngine):
    """Engine that records the dtypes in which the losses of another engine are computed."""

    def __init__(self, inner: Engine, device: str, dtypes: set[str]) -> None:
        super().__init__(inner)
        self._device, self._dtypes = device, dtypes

    @override
    def step(self, fn: LossFn, micros: Sequence[Micro], factor: Factor, mark: Mark) -> Step:
        def observed(model: nn.Module, batch: Any, number: int) -> Any:
            casts = " under autocast" if torch.is_autocast_enabled(self._device) else ""
            with _ProductDtypes(self._dtypes, casts):
                return fn(model, batch, number)

        return self.inner.step(observed, micros, factor, mark)


@final
class _ProductDtypes(TorchDispatchMode):
    """Dispatch mode that records the dtypes in which matrices are multiplied."""

    def __init__(self, dtypes: set[str], casts: str) -> None:
        super().__init__()
        self._dtypes, self._casts = dtypes, casts

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in MATRIX_PRODUCTS:
            self._dtypes.update(_dtype_word(t, self._casts) for t in args if isinstance(t, Tensor))
        return func(*args, **(kwargs or {}))


def _dtype_word(t: Tensor, casts: str) -> str:
    """Return the dtype in which a factor is multiplied: of a number in fp8, that of its bits."""
    if is_traceable_wrapper_subclass(t) and (bits := getattr(t, t.__tensor_flatten__()[0][0])).dtype.itemsize == 1:
        return short_dtype(bits.dtype)
    return short_dtype(t.dtype) + casts
