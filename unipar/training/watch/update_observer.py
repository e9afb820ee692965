"""`UpdateObserver`: what an optimizer of torch really does in one step, seen by its own hooks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self, cast, final

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from unipar.backend import Piece
from unipar.engines.state import local_part
from unipar.training.watch.digests import digest_tensor


class _Spot(NamedTuple):
    """A weight's region inside a storage: its name, its first byte, and how its elements lie."""

    name: str
    start: int
    shape: torch.Size
    stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        return self.shape.numel()

    def of(self, t: Tensor, like: Tensor) -> Tensor | None:
        """Return this region of `t`, which lies as `like` does, in whose storage it is; None if it lies otherwise."""
        if self.numel == like.numel():
            return t
        if t.stride() != like.stride():
            return None
        skipped = (self.start - like.data_ptr()) // like.element_size()
        return t.as_strided(self.shape, self.stride, t.storage_offset() + skipped)


_ROUNDINGS = 8.0
"""An update that should change a weight is at least this many times the distance from it to the next number."""

_LARGE = 0.01
"""Share of the rate by which an element changes at least, if its gradient is as large: AdamW's updates are bounded."""


class UnchangedWeight(NamedTuple):
    """A weight that an update left as it was, though it had a gradient that should have changed it."""

    name: str
    norm: float
    rate: float
    dtype: torch.dtype


@final
@dataclass
class UpdateObserver:
    """Context manager around an engine's step: it sees every update by an optimizer of torch.

    `weights` are this rank's regions of weights that no other rank speaks for: over all ranks each element counts once.
    """

    weights: Iterable[Piece]
    rates: list[float] = field(default_factory=list)
    """Learning rate of each group of the optimizer, as it was in the update."""

    norms: dict[str, float] = field(default_factory=dict)
    """Norm of the gradient that the optimizer got, of this rank's regions of each weight."""

    unchanged: list[UnchangedWeight] = field(default_factory=list)
    updated: bool = False
    """Whether an optimizer of torch took a step."""

    def __post_init__(self) -> None:
        self._spots: dict[int, list[_Spot]] = {}
        for piece in self.weights:
            t = piece.tensor
            spot = _Spot(piece.name, t.data_ptr(), t.shape, t.stride())
            if spot.numel:
                self._spots.setdefault(t.untyped_storage().data_ptr(), []).append(spot)
        self._depth = 0
        self._handles: list[RemovableHandle] = []
        self._before: list[tuple[UnchangedWeight, Tensor, Tensor, int]] = []

    @property
    def left_out(self) -> set[str]:
        """Names of weights with regions here of which the optimizer got no gradient."""
        return {spot.name for spots in self._spots.values() for spot in spots} - self.norms.keys()

    @property
    def square(self) -> float:
        """Square of the norm of this rank's gradients that count."""
        return sum(norm * norm for norm in self.norms.values())

    def __enter__(self) -> Self:
        self._handles = [
            register_optimizer_step_pre_hook(self._begin_update),
            register_optimizer_step_post_hook(self._after_update),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        while self._handles:
            self._handles.pop().remove()
        self._before.clear()

    def _begin_update(self, optimizer: Optimizer, *_: Any) -> None:
        self._depth += 1
        if self._depth == 1:  # a library's optimizer calls the one that it wraps
            self._handles.append(optimizer.register_step_pre_hook(self._before_update))  # behind all hooks of its own

    @torch.no_grad()
    def _before_update(self, optimizer: Optimizer, *_: Any) -> None:
        self._handles.pop().remove()
        self.updated = True
        spots: list[tuple[_Spot, Tensor, Tensor, float]] = []
        for group in optimizer.param_groups:
            rate = float(group["lr"])
            self.rates.append(rate)
            for p in group["params"]:
                if p.grad is not None:
                    spots += [(*entry, rate) for entry in self._find(local_part(p), local_part(p.grad))]
        gradients = [_in_full(gradient) for _, _, gradient, _ in spots]
        each = cast("list[Tensor]", torch._foreach_norm(gradients) if gradients else [])  # pyright: ignore[reportPrivateUsage]
        norms: list[float] = torch.stack(each).tolist() if each else []
        for (spot, value, gradient, rate), norm in zip(spots, norms, strict=True):
            self.norms[spot.name] = (self.norms.get(spot.name, 0.0) ** 2 + norm * norm) ** 0.5
            if norm > 0 and rate > 0:
                weight = UnchangedWeight(spot.name, norm, rate, value.dtype)
                self._before.append((weight, value, gradient, digest_tensor(value)))

    @torch.no_grad()
    def _after_update(self, *_: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            for weight, value, gradient, before in self._before:
                if digest_tensor(value) == before and _should_change(value, gradient, weight.rate):
                    self.unchanged.append(weight)
            self._before.clear()

    def _find(self, p: Tensor, gradient: Tensor) -> Iterable[tuple[_Spot, Tensor, Tensor]]:
        """Yield each region of a weight that is in the optimizer's tensor `p`: its values, and its gradient."""
        first, last = p.data_ptr(), p.data_ptr() + p.numel() * p.element_size()
        for spot in self._spots.get(p.untyped_storage().data_ptr(), ()):
            if first <= spot.start < last:
                value, mine = spot.of(p, p), spot.of(gradient, p)
                if value is not None and mine is not None:
                    yield spot, value, mine


def _in_full(gradient: Tensor) -> Tensor:
    """Return a gradient of which a norm can be taken."""
    return gradient if gradient.dtype in (torch.float32, torch.float64) else gradient.float()


def _should_change(value: Tensor, gradient: Tensor, rate: float) -> bool:
    """Return whether a step at this rate is large enough for some element to become another number.

    It is not where a rate has just begun to rise, or has nearly ended: a norm's weight of 1 stays 1 in fp32 at 1e-8.
    """
    step = _in_full(gradient).abs().clamp(max=_LARGE) * rate
    return bool((step > _ROUNDINGS * torch.finfo(value.dtype).eps * _in_full(value).abs()).any())
