"""Counts of tokens that experts get in training: added up on the device, and over ranks when they are taken."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from unipar.backend.expert_tokens import ExpertTokens
from unipar.distributed.world import World
from unipar_mesh.expert.expert_layer import ExpertLayer


@dataclass
class _RankTokens:
    """Tokens that this rank's experts of one layer got, in all microbatches and in the fullest; the host knows them."""

    total: int = 0
    most: int = 0
    microbatches: int = 0


@final
class TokenCounts:
    """Tokens of all layers of experts since they were last taken."""

    def __init__(self, layers: Sequence[ExpertLayer], world: World) -> None:
        self._world, self._sizes = world, [layer.experts for layer in layers]
        self._sent = torch.zeros(sum(self._sizes), dtype=torch.int64, device=world.device)
        """Tokens that this rank sends to each expert of each layer."""

        self._of_layer = dict(zip((layer.name for layer in layers), self._sent.split(self._sizes), strict=True))
        self._got = {name: _RankTokens() for name in self._of_layer}
        self._training = False

    @contextmanager
    def counting(self, *, on: bool = True) -> Generator[None]:
        """Context manager: forwards in the body are those of training, and are counted; or not, if `on` is false."""
        before, self._training = self._training, on
        try:
            yield
        finally:
            self._training = before

    def add(self, name: str, sent: Tensor, got: int) -> None:
        """Count a forward of a layer: tokens that this rank sends to each expert, and those that its own get."""
        if not self._training or _runs_again():
            return
        self._of_layer[name] += sent
        of_rank = self._got[name]
        of_rank.total, of_rank.most = of_rank.total + got, max(of_rank.most, got)
        of_rank.microbatches += 1

    def take(self) -> Mapping[str, ExpertTokens]:
        """Return the tokens of all ranks by layer, and begin again; all ranks call this, and wait for the device."""
        if not self._sizes:
            return {}
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


def logged_bytes(layers: Sequence[ExpertLayer]) -> Sequence[int]:
    """Return the bytes of each collective of `TokenCounts.take`."""
    int64 = torch.int64.itemsize
    return (3 * int64 * len(layers), int64 * sum(layer.experts for layer in layers)) if layers else ()


def _runs_again() -> bool:
    """Return whether a backward runs this forward for values that were not kept."""
    return torch._C._current_graph_task_id() != -1  # pyright: ignore[reportPrivateUsage] - no public way
