"""`ShardedModel`: a model in the groups in which FSDP2 gathers and reduces it, and what is there of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from math import ceil, prod
from typing import Final

from unipar.prediction.timeline import MemoryPlace, PredictedParameter, StepTimeline


@dataclass(frozen=True)
class ShardedModel:
    """A model that FSDP2 shards over this many ranks, in groups, which are its blocks and the rest (-1)."""

    timeline: StepTimeline
    ranks: int
    _: KW_ONLY
    masters: bool
    """True if shards, gradients and the optimizer's state are fp32 beside parameters that compute in bf16."""

    staged: bool
    """True if collectives of several ranks copy what they send, as gloo does."""

    reshard: bool
    """True if blocks are freed between their forward and their backward."""

    reshard_rest: bool
    """True if the rest is, too."""

    once: bool
    """True if parameters stay gathered, and gradients whole, until the last microbatch of a step."""

    offloaded: bool = False
    """True if shards, their gradients and the optimizer's tensors are on the host."""

    in_copies: bool = False
    """True if the mesh has a dimension of copies, be it of one: what was reduced is then kept until backward ends."""

    ranks_of_groups: Mapping[int, int] = field(default_factory=dict[int, int])
    """Ranks of groups that are sharded over fewer than the others, by number of the block."""

    whole_groups: frozenset[int] = frozenset()
    """Numbers of the blocks that FSDP2 does not have, since no other rank trains their parameters."""

    def ranks_in(self, group: int) -> int:
        """Return over how many ranks a group is sharded."""
        return self.ranks_of_groups.get(group, self.ranks)

    def copies_what_is_sent(self, group: int) -> bool:
        """Return whether a group's collectives copy what they send."""
        return self.staged and self.ranks_in(group) > 1

    def padded(self, p: PredictedParameter) -> int:
        """Return the elements of a parameter with its first dimension made a multiple of the ranks of its group."""
        return padded_elements(p, self.ranks_in(p.block))

    @cached_property
    def gathered(self) -> Mapping[int, int]:
        """Bytes of a group as it computes, by number of its block; none of those that FSDP2 does not have."""
        sizes = dict.fromkeys(self._groups, 0)
        for p in self.timeline.parameters:
            if p.block not in self.whole_groups:
                sizes[p.block] += self.padded(p) * (COMPUTING_BYTES if self.masters else p.element_size)
        return sizes

    @cached_property
    def gradient_bytes(self) -> Mapping[int, int]:
        """Bytes of the whole gradients of a group as they are summed up over ranks: of all that the loss uses."""
        return {group: sum(self.padded(p) * p.element_size for _, p in self.used_in(group)) for group in self._groups}

    @property
    def _groups(self) -> Sequence[int]:
        return -1, *range(len(self.timeline.blocks))

    @property
    def home(self) -> MemoryPlace:
        """Place of a rank's shards."""
        return "host" if self.offloaded else "device"

    @property
    def prefetches(self) -> bool:
        """True if a block is gathered while the one behind it runs backward: FSDP2 forgets their order behind one."""
        turn = self.timeline.turn
        return turn is None or turn.told or turn.after != "backward"

    @property
    def frees_blocks(self) -> bool:
        """True if blocks are gathered once more in backward.

        That is also so if the microbatch before has freed in its backward what this one had gathered in its forward.
        """
        turn = self.timeline.turn
        return self.reshard or (not self.once and turn is not None and turn.after == "backward")

    @property
    def gathered_before(self) -> bool:
        """True if an earlier microbatch has left parameters gathered."""
        turn = self.timeline.turn
        kept = not self.reshard and turn is not None and turn.phase == turn.after == "forward"
        return kept or (self.once and self.timeline.follows)

    @property
    def summed_before(self) -> bool:
        """True if an earlier microbatch has left gradients whole."""
        return self.once and self.timeline.accumulates

    @property
    def reduced_before(self) -> bool:
        """True if gradients of earlier microbatches are there, reduced."""
        return not self.once and self.timeline.accumulates

    @property
    def reduces(self) -> bool:
        """True if gradients are reduced in this microbatch."""
        return not self.once or self.timeline.is_last

    @cached_property
    def order(self) -> Sequence[int]:
        """Numbers of the groups that have parameters, in the order in which a forward leaves them: the rest last."""
        return [g for g in (*range(len(self.timeline.blocks)), -1) if self.gathered[g]]

    def name(self, group: int) -> str:
        """Return the name of a group's block, or "rest"."""
        return self.timeline.blocks[group] if group >= 0 else "rest"

    def used_in(self, group: int) -> Sequence[tuple[int, PredictedParameter]]:
        """Return the parameters of a group that get a gradient, with their numbers."""
        return self._used.get(group, ())

    @cached_property
    def _used(self) -> Mapping[int, Sequence[tuple[int, PredictedParameter]]]:
        by_block: dict[int, list[tuple[int, PredictedParameter]]] = {}
        for number, p in enumerate(self.timeline.parameters):
            if p.trained and self.timeline.has_gradient(number):
                by_block.setdefault(p.block, []).append((number, p))
        return by_block

    def last_used_in(self, group: int) -> PredictedParameter | None:
        """Return the parameter of a group whose gradient FSDP2 takes last; None: none gets a gradient."""
        return next(iter(reversed(in_order_of_modules([p for _, p in self.used_in(group)]))), None)

    def is_reached(self, group: int) -> bool:
        """Return whether a gradient arrives at a group, which is gathered for it."""
        return group < 0 or self.timeline.happens("backward", "reach", group)

    def is_freed(self, group: int) -> bool:
        """Return whether a group is freed between its forward and its backward."""
        return not self.gathered_before and (self.frees_blocks if group >= 0 else self.reshard_rest)

    def gathered_ahead_by(self, group: int) -> int | None:
        """Return the group that is gathered in backward while this one computes; None if none is."""
        place = self.order.index(group)
        if not (place and self.prefetches and self.is_freed(self.order[place - 1])):
            return None
        return self.order[place - 1]

    def gathered_ahead_of(self, group: int) -> int | None:
        """Return the group during whose backward this one is gathered; None: it is gathered when it is reached."""
        behind = self.order[self.order.index(group) + 1 :]
        asks = bool(behind) and self.is_reached(behind[0]) and self.gathered_ahead_by(behind[0]) == group
        return behind[0] if asks else None

    def is_gathered_for_nothing(self, group: int) -> bool:
        """Return whether a group is gathered ahead in backward, and no gradient arrives at it."""
        return not self.is_reached(group) and self.gathered_ahead_of(group) is not None

    @property
    def gathered_again(self) -> Sequence[int]:
        """Numbers of the groups that are gathered in backward."""
        return [g for g in self.order if (self.is_freed(g) and self.is_reached(g)) or self.is_gathered_for_nothing(g)]

    def sent_with(self, group: int) -> Mapping[str, int]:
        """Return what is there while a group is gathered, by name."""
        ranks = self.ranks_in(group)
        sizes = {"all-gather": self.gathered[group]} if ranks > 1 else {}
        if self.copies_what_is_sent(group):
            sizes["staged"] = self.gathered[group]
        if self.masters and ranks > 1:
            sizes["shards in bf16"] = self.gathered[group] // ranks
        if self.offloaded:
            own = [self.bytes_of_shard(p) for p in self.timeline.parameters if p.block == group]
            moved = max(own, default=0) if self.masters else sum(own)  # one after the other is cast to bf16
            sizes["shards, from the host"] = moved
        return sizes

    def elements_of_shard(self, p: PredictedParameter) -> int:
        """Return the elements of the largest share of a parameter."""
        return self.padded(p) // self.ranks_in(p.block)

    def bytes_of_shard(self, p: PredictedParameter) -> int:
        """Return the bytes of a rank's share of a parameter, or of its gradient."""
        return self.elements_of_shard(p) * p.element_size

    def cast_alone(self, group: int) -> int:
        """Return the bytes by which a rank without others needs more for a moment: it casts one by one, and keeps two.

        Nothing is gathered there: a parameter gets its memory, and is filled from a cast copy.
        """
        if self.ranks_in(group) > 1 or not self.masters:
            return 0
        members = in_order_of_modules([p for p in self.timeline.parameters if p.block == group])
        sizes = [p.numel * COMPUTING_BYTES for p in members]
        return max(0, *(sizes[n] - sum(sizes[n + 2 :]) for n in range(len(sizes))))


COMPUTING_BYTES: Final = 2
"""Bytes of an element of a parameter that computes in bf16 beside an fp32 master."""


def padded_elements(p: PredictedParameter, ranks: int) -> int:
    """Return the elements of a parameter with its first dimension made a multiple of the number of ranks."""
    rows = p.shape[0] if p.shape else 1
    return ceil(rows / ranks) * ranks * prod(p.shape[1:])


def in_order_of_modules(parameters: Sequence[PredictedParameter], inside: int = 0) -> list[PredictedParameter]:
    """Return parameters in FSDP2's order: a module's own come behind those of the modules in it.

    `inside`: number of names of modules that all of them have in common.
    """
    parts: dict[str, list[PredictedParameter]] = {}
    for p in parameters:
        names = p.name.split(".")[inside:]
        parts.setdefault(names[0] if len(names) > 1 else "", []).append(p)
    own = parts.pop("", [])
    return [p for part in parts.values() for p in in_order_of_modules(part, inside + 1)] + own
