"""Counts of tokens that experts get in training: added up on the device, and over ranks when they are taken."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, final

import torch
import torch.distributed as dist
from torch import Tensor

from unipar.backend.expert_tokens import ExpertTokens
from unipar.distributed.world import World
from unipar_mesh.expert.expert_layer import ExpertLayer

AT_ONCE: Final = 256
"""Forwards of a layer at most of which ranks tell one another, together, how many tokens they have sent."""


@dataclass
class _RankTokens:
    """Tokens that this rank's experts of one layer got, in all microbatches and in the fullest; the host knows them."""

    total: int = 0
    most: int = 0
    microbatches: int = 0

    def add(self, got: int) -> None:
        """Add a microbatch."""
        self.total, self.most, self.microbatches = self.total + got, max(self.most, got), self.microbatches + 1


@final
class TokenCounts:
    """Tokens of all layers of experts since they were last taken."""

    def __init__(self, layers: Sequence[ExpertLayer], world: World) -> None:
        self._world, self._sizes = world, [layer.experts for layer in layers]
        self._sent = torch.zeros(sum(self._sizes), dtype=torch.int64, device=world.device)
        """Tokens that this rank sends to each expert of each layer."""

        self._of_layer = dict(zip((layer.name for layer in layers), self._sent.split(self._sizes), strict=True))
        self._got = {name: _RankTokens() for name in self._of_layer}
        self._waiting: dict[str, list[Tensor]] = {name: [] for name in self._of_layer}
        """Tokens sent to each expert in forwards of which this rank does not know yet what its own experts got."""

        self._training = False

    @contextmanager
    def counting(self, *, on: bool = True) -> Generator[None]:
        """Context manager: forwards in the body are those of training, and are counted; or not, if `on` is false."""
        before, self._training = self._training, on
        try:
            yield
        finally:
            self._training = before

    def add(self, name: str, sent: Tensor, got: int | None = None) -> None:
        """Count a forward of a layer: tokens that this rank sends to each expert, and those that its own get.

        None: the host does not know; ranks find out later, many forwards at once.
        """
        if not self._training or _runs_again():
            return
        self._of_layer[name] += sent
        if got is not None:
            self._got[name].add(got)
            return
        self._waiting[name].append(sent.clone())
        if len(self._waiting[name]) == AT_ONCE:
            self._find_out(name)

    def _find_out(self, name: str) -> None:
        """Count what this rank's experts got in the forwards that wait; ranks of `expert` run as many, and all call."""
        if waiting := self._waiting[name]:
            group, sent = self._world.groups.experts(), torch.stack(waiting)
            dist.all_reduce(sent, group=group)
            waiting.clear()
            for got in sent.view(len(sent), group.size(), -1)[:, group.rank()].sum(1).tolist():
                self._got[name].add(got)

    def take(self) -> Mapping[str, ExpertTokens]:
        """Return the tokens of all ranks by layer, and begin again; all ranks call this, and wait for the device."""
        if not self._sizes:
            return {}
        for name in self._waiting:
            self._find_out(name)
        world, got = self._world, self._got.values()
        fullest = torch.tensor([(g.total, g.most, g.microbatches) for g in got], device=world.device)
        dist.all_reduce(fullest, op=dist.ReduceOp.MAX)
        # ranks along `tensor` have the same tokens, those along `pipeline` other layers, those along `context` others
        own = self._sent.clone() if world.mesh.seat["tensor"] == 0 else torch.zeros_like(self._sent)
        tokens = [layer.tolist() for layer in world.sum(own).cpu().split(self._sizes)]
        of_layer = zip(self._got, tokens, fullest.tolist(), strict=True)
        self.forget()
        ranks = world.data_size * world.mesh.sizes["context"]
        return {
            name: ExpertTokens(each, total * ranks / sum(each), most * microbatches * ranks / sum(each))
            for name, each, (total, most, microbatches) in of_layer
            if any(each)
        }

    def forget(self) -> None:
        """Begin to count again."""
        self._sent.zero_()
        self._got = {name: _RankTokens() for name in self._got}
        self._waiting = {name: [] for name in self._got}


def logged_bytes(layers: Sequence[ExpertLayer]) -> Sequence[int]:
    """Return the bytes of each collective of `TokenCounts.take`."""
    int64 = torch.int64.itemsize
    return (3 * int64 * len(layers), int64 * sum(layer.experts for layer in layers)) if layers else ()


def _runs_again() -> bool:
    """Return whether a backward runs this forward for values that were not kept."""
    return torch._C._current_graph_task_id() != -1  # pyright: ignore[reportPrivateUsage] - no public way
