"""State found in a checkpoint of another library: regions of tensors, by the names that the model has for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor

from unipar.backend import Region
from unipar.checkpoint.protocol.save_checkpoint import PieceToSave
from unipar.checkpoint.tensor_bytes import bytes_of, dtype_name
from unipar.errors import CheckpointError
from unipar.utils.text import first_few


@dataclass(frozen=True)
class ModelState:
    """Names of the model's state in its own order, with shapes; JSON holds it."""

    parameters: Mapping[str, Sequence[int]]
    trained: Sequence[str]
    buffers: Mapping[str, Sequence[int]]
    """Persistent buffers."""

    tied: Sequence[Sequence[str]]
    dtype: str
    """Dtype of floating-point weights and buffers, without `torch.`."""

    narrow: Mapping[str, str] = field(default_factory=dict[str, str])
    """Dtypes of frozen parameters that stay narrower than `dtype`, by name."""

    groups: Sequence[Sequence[str]] = ()
    """Parameters in the optimizer's groups that the task makes by its own groups(model); none if it has no such."""

    def target(self, name: str) -> str:
        """Return the first name of a parameter that has several."""
        return next((names[0] for names in self.tied if name in names), name)


@dataclass
class ForeignState:
    """Pieces of a checkpoint that was found, and what is known about the training."""

    step: int | None = None
    skipped: int = 0
    """Number of those steps whose update was left out because of the loss scale."""

    pieces: list[PieceToSave] = field(default_factory=list[PieceToSave])
    remarks: list[str] = field(default_factory=list[str])
    largest_step: float = 0.0
    """Largest count of steps that the optimizer keeps."""


@final
class StateCollector:
    """Collector of regions of tensors; it knows the model's names and dtypes."""

    def __init__(self, source: str, model: ModelState, rename: Sequence[tuple[str, str]] = ()) -> None:
        """`rename`: beginnings of names, each with what takes its place."""
        self.source, self.model, self.state = source, model, ForeignState()
        self._rename = rename
        self._prefix = ""
        self._added: set[tuple[str, str, Region]] = set()
        self._unknown: list[str] = []
        self._cast: dict[str, set[str]] = {}
        """Dtypes of weights that were cast, by the dtype that they have now."""

    def learn_prefix(self, names: Iterable[str]) -> None:
        """Find what the other library puts before all names of the model, if it does."""
        there = {self._plain(name) for name in names}
        wanted = [*self.model.parameters, *self.model.buffers]
        if any(name in there for name in wanted):
            return
        prefixes = {name[: -len(wanted[0])] for name in there if name.endswith(f".{wanted[0]}")}
        fits = [prefix for prefix in prefixes if all(prefix + name in there for name in wanted)]
        if len(fits) == 1:
            self._prefix = fits[0]
            self.state.remarks.append(f"names begin with {fits[0]!r} in {self.source}, which is taken away")

    def _plain(self, name: str) -> str:
        steps = [step for step in name.split(".") if step != "_orig_mod"]
        while len(steps) > 1 and steps[0] == "module":
            del steps[0]
        name = ".".join(steps)
        for old, new in self._rename:
            if name.startswith(old):
                return new + name[len(old) :]
        return name

    def name(self, theirs: str) -> str | None:
        """Return the model's name for one of the other library's, or None if the model has none."""
        name = self.model.target(self._plain(theirs).removeprefix(self._prefix))
        return name if name in self.model.parameters or name in self.model.buffers else None

    def add_weight(self, theirs: str, t: Tensor, where: Region | None = None) -> None:
        """Add a weight or buffer, or a region of one."""
        name = self.name(theirs)
        if name is None:
            self._unknown.append(theirs)
        elif name in self.model.buffers:
            self._add(name, "buffer", t, tuple(self.model.buffers[name]), where, self._weight_dtype(name, t))
        else:
            shape = tuple(self.model.parameters[name])
            self._add(name, "weight", t, shape, where, self._weight_dtype(name, t))

    def add_moment(self, theirs: str, kind: str, value: Any, where: Region | None = None) -> None:
        """Add a tensor or number that the optimizer keeps for a parameter, or a region of it."""
        name = self.name(theirs)
        if name is None or name not in self.model.parameters:
            raise CheckpointError(
                f"{self.source}: the optimizer has a state for {theirs}, which the model does not have"
            )
        self.add_moment_of(name, kind, value, where)

    def add_moment_of(self, name: str, kind: str, value: Any, where: Region | None = None) -> None:
        """Add what the optimizer keeps for a parameter that is known by the model's name for it."""
        t = torch.as_tensor(value)
        if t.numel() == 1 and kind == "step":
            self.state.largest_step = max(self.state.largest_step, float(t))
            self._add(name, "step", t.float().view(()), (), None, torch.float32)
        else:
            shape = tuple(self.model.parameters[name]) if t.ndim or where else ()
            self._add(name, kind, t, shape, where, t.dtype)

    def _weight_dtype(self, name: str, t: Tensor) -> torch.dtype:
        called = self.model.narrow.get(name, self.model.dtype)
        dtype: torch.dtype = getattr(torch, called)
        if t.is_floating_point() and t.dtype != dtype:
            self._cast.setdefault(called, set()).add(f"{t.dtype}".removeprefix("torch."))
            return dtype
        return t.dtype

    def _add(
        self, name: str, kind: str, t: Tensor, shape: tuple[int, ...], where: Region | None, dtype: torch.dtype
    ) -> None:
        if where is None and tuple(t.shape) != shape:
            raise CheckpointError(
                f"{self.source}: {name} ({kind}) has the shape {list(t.shape)}, in the model {list(shape)}"
            )
        where = Region(0, math.prod(shape)) if where is None else where
        if (name, kind, where) in self._added or (not where.numel and math.prod(shape)):
            return
        self._added.add((name, kind, where))
        called = dtype_name(torch.empty(0, dtype=dtype), name)
        self.state.pieces.append(PieceToSave(name, kind, called, shape, where, _later(t, dtype)))

    def finish(self) -> ForeignState:
        """Return what was found; raise CheckpointError if a weight of the model is missing."""
        have = {(name, kind) for name, kind, _ in self._added}
        missing = [n for n in self.model.parameters if (n, "weight") not in have]
        missing += [n for n in self.model.buffers if (n, "buffer") not in have]
        if missing:
            there = f"; it has {first_few(self._unknown)}, which the model does not have" if self._unknown else ""
            raise CheckpointError(
                f"{self.source} does not have {first_few(missing)}, which the model has{there}; "
                "if only the beginning of names differs: --rename OLD=NEW"
            )
        if self._unknown:
            self.state.remarks.append(f"left out, since the model does not have it: {first_few(self._unknown)}")
        for called, before in sorted(self._cast.items(), key=lambda item: item[0] != self.model.dtype):
            frozen = "frozen " if called != self.model.dtype else ""
            self.state.remarks.append(f"{frozen}weights cast from {', '.join(sorted(before))} to {called}")
        if all(kind in ("weight", "buffer") for _, kind in have):
            self.state.remarks.append("it holds no state of the optimizer, which starts anew")
        if self.state.step is None and self.state.largest_step:
            self.state.step = int(self.state.largest_step)
        return self.state


def _later(t: Tensor, dtype: torch.dtype) -> Callable[[], memoryview]:
    return lambda: bytes_of(t.detach().to(dtype).contiguous())
