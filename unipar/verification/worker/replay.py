"""Replay: one process that does what several ranks would, with the gradient of each share of a batch kept apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any, Literal, final

import torch
from torch import Tensor, nn
from typing_extensions import override

from unipar.backend import Holding, Part, Region
from unipar.config import Config
from unipar.distributed.world import World
from unipar.engines.fingerprint import TensorSketcher, sketch_units, sketch_whole_tensor
from unipar.engines.placement import broadcast_model
from unipar.engines.wrapper import WrapperEngine

GradientList = list[Tensor | None]
"""Gradients of all trained parameters, in order; None for one that got none."""

ADDITION_ORDERS: dict[str, Literal["shares", "micros"]] = {
    "shares": "shares",  # each share adds its microbatches, then the shares are added
    "micros": "micros",  # each microbatch is added over the shares, then the microbatches
}
"""Orders in which a replay can add gradients."""


@final
class ReplayEngine(WrapperEngine):
    """Engine of a replay; it takes the microbatches of all shares: the first of each, then the second of each.

    A share is what one rank trains on, or several ranks that split the work on the same samples.
    """

    def __init__(
        self, part: Part, config: Config, world: World, count: int, order: str, *, per_microbatch: bool
    ) -> None:
        broadcast_model(part.module, world.device)
        super().__init__(part, config, world)
        self.count, self.order, self.divisor = count, ADDITION_ORDERS[order], float(count)
        self._names = {id(p): n for n, p in part.module.named_parameters()}
        self._uses = Counter(id(p) for _, p in part.module.named_parameters(remove_duplicate=False))
        self._per_microbatch, self._sketches = per_microbatch, TensorSketcher()
        self._begin()
        self.shares: list[dict[str, Any]] = []
        """By step: sketch of each microbatch's gradient, norm of each share, and of each whole gradient; empty unless
        `per_microbatch`."""

    def _begin(self) -> None:
        self._number = 0
        self._sums: list[GradientList] = []
        self._total: GradientList | None = None
        self._parts: dict[str, dict[str, Tensor]] = {}

    @override
    @contextmanager
    def sync(self, micros: int, *, last: bool) -> Generator[None]:
        micro, share = divmod(self._number, self.count)
        self._number += 1
        buffers = [(b, b.clone()) for b in self.model.buffers()] if share else []
        yield
        for buffer, was in buffers:
            buffer.data.copy_(was)  # the ranks of the first share speak for all, and saw only its samples
        grads: GradientList = [p.grad for p in self.trained]
        for p in self.trained:
            p.grad = None
        if self._per_microbatch:
            # what the loss does not use has a gradient of zero, as every engine gives it to the optimizer
            gradients = [torch.zeros_like(p) if g is None else g for p, g in zip(self.trained, grads, strict=True)]
            sketches = self._parts[f"{micro}.{share}"] = dict[str, Tensor]()
            for p, g in zip(self.trained, gradients, strict=True):
                name, part = self._names[id(p)], g / self.count
                sketches[name] = sketch_whole_tensor(self._sketches, name, part)
                sketches |= sketch_units(self._sketches, name, p.shape, Region(0, p.numel()), part)
        if self.order == "micros":
            self._sums.append(grads)
            if share == self.count - 1:
                added = self._over_shares(self._sums)
                self._total = added if self._total is None else _add_gradients(self._total, added)
                self._sums = []
        elif micro == 0:
            self._sums.append(grads)
        else:
            self._sums[share] = _add_gradients(self._sums[share], grads)

    @override
    def extra_holdings(self) -> Iterator[Holding]:
        for grads in (*self._sums, self._total or []):
            for p, g in zip(self.trained, grads, strict=False):
                if g is not None:
                    yield Holding("gradients", self._names[id(p)], g)

    def groups(self) -> list[dict[str, Any]]:
        """Return the optimizer's groups: names of their parameters, of those that several modules have, and decay."""
        return [
            {
                "names": [self._names[id(p)] for p in g["params"]],
                "decay": float(g["weight_decay"]),
                "tied": [self._names[id(p)] for p in g["params"] if self._uses[id(p)] > 1],
            }
            for g in self.base.param_groups
        ]

    def _over_shares(self, shares: list[GradientList]) -> GradientList:
        total = _map_gradients(shares[0], self._divided)
        for other in shares[1:]:
            total = _add_gradients(total, _map_gradients(other, self._divided))
        return total

    def _divided(self, grad: Tensor) -> Tensor:
        return grad / self.count

    @override
    def finish_reduction(self) -> None:
        total = self._over_shares(self._sums) if self._total is None else self._total
        if self._per_microbatch:
            norms = [_norm(share) for share in self._sums] if self.order == "shares" else []
            lengths = {self._names[id(p)]: _norm([g]) for p, g in zip(self.trained, total, strict=True)}
            self.shares.append({"parts": self._parts, "norms": norms, "lengths": lengths})
        for p, g in zip(self.trained, total, strict=True):
            p.grad = g
        self._begin()


def _map_gradients(grads: GradientList, change: Callable[[Tensor], Tensor]) -> GradientList:
    return [None if g is None else change(g) for g in grads]


def _add_gradients(one: GradientList, other: GradientList) -> GradientList:
    return [b if a is None else a if b is None else a + b for a, b in zip(one, other, strict=True)]


def _norm(grads: GradientList) -> float:
    return sum(float(g.double().square().sum()) for g in grads if g is not None) ** 0.5


def replay_builder(
    count: int, order: str, *, per_microbatch: bool, perturbed: bool = False
) -> Callable[[Part, Config, World], ReplayEngine]:
    """Return a function that builds an engine for a part, which replays this many shares, with these settings."""

    def build(part: Part, config: Config, world: World) -> ReplayEngine:
        if perturbed:
            change_last_place(part.module, config.train.seed)
        return ReplayEngine(part, config, world, count, order, per_microbatch=per_microbatch)

    return build


@torch.no_grad()
def change_last_place(module: nn.Module, seed: int) -> None:
    """Move every weight to the next larger or the next smaller number of its precision, by chance."""
    generator = torch.Generator().manual_seed(seed)
    for p in module.parameters():
        if p.is_floating_point():
            up = torch.randint(0, 2, p.shape, generator=generator).to(p.device, torch.bool)
            p.copy_(
                torch.where(
                    up, torch.nextafter(p, p.new_tensor(torch.inf)), torch.nextafter(p, p.new_tensor(-torch.inf))
                )
            )
