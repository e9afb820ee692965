"""Blocks that are equal: three of them run on fake tensors, and their record is that of any number."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
from torch import nn

from unipar.prediction.timeline import Moment
from unipar.training.fake_run.step_recorder import FakeBlock, StepRecord

KEPT = 3
"""Number of equal blocks that run: a first one, one for all between, and a last one."""

_POSITIONS = ("idx", "index", "number", "layer_id")
"""Ends of names of attributes that tell a block its place, and nothing about what it computes."""


@dataclass(frozen=True)
class EqualBlocks:
    """All children of one container, which are blocks with the same modules, shapes and settings."""

    container: str
    keys: tuple[str, ...]
    first: int
    """Number of the first of them among the model's blocks."""

    def name(self, number: int) -> str:
        """Return the name that one of them has if it comes at this place."""
        return f"{self.container}.{number}" if self.container else str(number)

    def kept(self, number: int) -> tuple[str, ...]:
        """Return the keys of this many of them: the first ones, and the last."""
        return (*self.keys[: number - 1], self.keys[-1])


def find_equal_blocks(model: nn.Module, blocks: Sequence[str]) -> list[EqualBlocks]:
    """Return containers of more equal blocks than need to run, whose parameters are in no other module."""
    users: dict[int, int] = {}
    for module in model.modules():
        for p in module.parameters(recurse=False):
            users[id(p)] = users.get(id(p), 0) + 1
    equal_blocks: list[EqualBlocks] = []
    for container in dict.fromkeys(name.rpartition(".")[0] for name in blocks):
        parent = model.get_submodule(container)
        keys = tuple(name for name, _ in parent.named_children())
        names = tuple(f"{container}.{key}" if container else key for key in keys)
        in_order = tuple(name for name in blocks if name in set(names))
        if not isinstance(parent, nn.ModuleList | nn.Sequential) or len(keys) <= KEPT + 1:
            continue
        if keys != tuple(map(str, range(len(keys)))) or names != in_order:
            continue
        own = all(users[id(p)] == 1 for p in parent.parameters())
        if own and len({_signature(block) for block in parent.children()}) == 1:
            equal_blocks.append(EqualBlocks(container, keys, list(blocks).index(names[0])))
    return equal_blocks


def _signature(block: nn.Module) -> tuple[Any, ...]:
    """Return what tells two blocks apart: classes, shapes, and settings that are plain values."""
    signature: list[Any] = []
    for name, module in block.named_modules():
        plain = {k: v for k, v in vars(module).items() if isinstance(v, int | float | str | bool | type(None))}
        settings = sorted((k, repr(v)) for k, v in plain.items() if not k.endswith(_POSITIONS))
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        shapes = tuple((key, tuple(t.shape), t.dtype, t.requires_grad) for key, t in tensors)
        signature.append((name, type(module), tuple(settings), shapes))
    recomputed = hasattr(block.__dict__.get("forward"), "unipar_recomputes")
    return (*signature, recomputed)


@final
class ShortModel:
    """A model in which each container of equal blocks has only some of them, for as long as it is open."""

    def __init__(self, model: nn.Module, blocks: Sequence[str], equal: Sequence[EqualBlocks], kept: int) -> None:
        self.model, self.equal, self.number = model, equal, kept
        self._all_blocks = tuple(blocks)
        self._parameters: tuple[str, ...] = ()
        self._modules: tuple[str, ...] = ()

    @property
    def blocks(self) -> tuple[str, ...]:
        """Names of the blocks that are there."""
        left_out = {equal.name(i) for equal in self.equal for i in range(self.number, len(equal.keys))}
        return tuple(name for name in self._all_blocks if name not in left_out)

    @contextmanager
    def open(self) -> Generator[None]:
        """Context manager: leave blocks out, and put them back."""
        with ExitStack() as stack:
            for equal in self.equal:
                container: Any = self.model.get_submodule(equal.container)
                all_modules = dict(container._modules)
                container._modules = {str(i): all_modules[key] for i, key in enumerate(equal.kept(self.number))}
                stack.callback(setattr, container, "_modules", all_modules)
            self._parameters = tuple(name for name, _ in self.model.named_parameters())
            self._modules = tuple(name for name, _ in self.model.named_modules())
            yield

    def stands_for(self, longer: ShortModel, record: StepRecord, expected: StepRecord) -> bool:
        """Return whether its record leads to that of a model with more of the blocks."""
        return same_memory(self._repeated(record, longer.number), expected)

    def extended(self, record: StepRecord) -> StepRecord:
        """Return the record of the whole model from its own."""
        longer = self._repeated(record, None)
        parameters = {name: number for number, (name, _) in enumerate(self.model.named_parameters())}
        modules = {name: number for number, (name, _) in enumerate(self.model.named_modules())}

        def in_whole(moment: Moment) -> Moment:
            if moment.parameter >= 0:
                name = self._name_in_whole(self._parameters[moment.parameter], moment.block)
                return moment._replace(parameter=parameters[name])
            if moment.module >= 0:
                return moment._replace(module=modules[self._name_in_whole(self._modules[moment.module], moment.block)])
            return moment

        return replace(
            longer,
            moments=tuple((tick, in_whole(moment)) for tick, moment in longer.moments),
            passing=frozenset(name for name in modules if self._name_in_short(name) in record.passing),
            viewed=frozenset(name for name in parameters if self._name_in_short(name) in record.viewed),
            viewed_again=frozenset(name for name in parameters if self._name_in_short(name) in record.viewed_again),
        )

    def _repeated(self, record: StepRecord, number: int | None) -> StepRecord:
        """Return the record of a model with this many of the blocks, or with all."""
        for equal in reversed(self.equal):
            middle = self.blocks.index(equal.name(0)) + self.number - 2
            record = repeat_block(record, middle, (number or len(equal.keys)) - self.number + 1)
        return record

    def _name_in_whole(self, name: str, block: int) -> str:
        """Return the name that a parameter or a module of the short model has in a block of the whole one."""
        for equal in self.equal:
            if 0 <= block - equal.first < len(equal.keys):
                return f"{self._all_blocks[block]}{name[len(equal.name(0)) :]}"
        return name

    def _name_in_short(self, name: str) -> str:
        """Return the name, in the short model, of what stands for a parameter or a module of the whole one."""
        for equal in self.equal:
            start = equal.name(0)[:-1]
            key, dot, rest = name.removeprefix(start).partition(".")
            if name.startswith(start) and key.isdigit():
                number, last = int(key), len(equal.keys) - 1
                place = number if number < self.number - 1 else self.number - 1 if number == last else self.number - 2
                return f"{equal.name(place)}{dot}{rest}"
        return name


def repeat_block(record: StepRecord, block: int, count: int) -> StepRecord:
    """Return a record in which a block, of one that runs after another equal one, has run `count` times in a row.

    Raise KeyError if its forward or backward has no beginning, or if they do not lie between those of its neighbours.
    """
    places = {moment[:3]: tick for tick, moment in record.moments}
    ahead = [places["forward", "reach", each] for each in (block, block + 1)]
    behind = [places["backward", "reach", each] for each in (block + 1, block, block - 1)]
    if (ticks := [*ahead, *behind]) != sorted(ticks):
        raise KeyError(block)
    period = _Period(ahead[0], ahead[1], behind[0], behind[1], behind[2], count)
    blocks = [
        replace(each, born=period.moved(each.born, copy), died=period.death(each, copy))
        for each in record.blocks
        for copy in period.copies(each.born)
    ]
    moments = [
        (period.moved(tick, copy), period.numbered(tick, moment, block, copy), work)
        for (tick, moment), work in zip(record.moments, record.works, strict=True)
        for copy in period.copies(tick)
    ]
    blocks.sort(key=lambda each: each.born)
    moments.sort(key=lambda each: each[0])
    return replace(
        record,
        blocks=tuple(blocks),
        moments=tuple(moment[:2] for moment in moments),
        works=tuple(moment[2] for moment in moments),
    )


@dataclass(frozen=True)
class _Period:
    """Ticks of a block's forward and backward, and those of its neighbours, and how often it is repeated."""

    forward: int
    after: int
    """Tick at which the next block's forward begins."""

    above: int
    """Tick at which the next block's backward begins."""

    backward: int
    below: int
    """Tick at which the backward of the block before begins."""

    count: int

    def copies(self, tick: int) -> Sequence[int]:
        """Return the copies in which something that happens at this tick happens."""
        inside = self.forward <= tick < self.after or self.backward <= tick < self.below
        return range(self.count) if inside else (0,)

    def moved(self, tick: int, copy: int) -> int:
        """Return the tick of a copy, counted from the first, at which happens what happened at `tick`."""
        more = self.count - 1
        ahead, behind = self.after - self.forward, self.below - self.backward
        if tick < self.forward:
            return tick
        if tick < self.after:
            return tick + copy * ahead
        if tick < self.backward:
            return tick + more * ahead
        if tick < self.below:
            return tick + more * ahead + (more - copy) * behind
        return tick + more * (ahead + behind)

    def numbered(self, tick: int, moment: Moment, block: int, copy: int) -> Moment:
        """Return a moment of a copy of a block, or of one beside it, with the number of its block among all."""
        more = self.count - 1
        if moment.block < 0:
            return moment
        if self.forward <= tick < self.after or self.backward <= tick < self.below:
            return moment._replace(block=moment.block + copy)
        last = self.after <= tick < self.backward  # from there the last copy is the next
        return moment._replace(
            block=moment.block + (more if moment.block > block or (last and moment.block == block) else 0)
        )

    def death(self, block: FakeBlock, copy: int) -> int | None:
        """Return the last tick of a copy of what was allocated."""
        died, more = block.died, self.count - 1
        if died is None:
            return None
        in_forward = self.forward <= block.born < self.after
        in_backward = self.backward <= block.born < self.below
        if in_forward and self.after <= died < self.backward and copy < more:  # the next block frees it
            if died >= self.above:
                return self._shifted(died, self.above, self.backward, copy + 1)
            return self._shifted(died, self.after, self.forward, copy + 1)
        if (in_forward or in_backward) and died >= self.below and copy > 0:  # the backward of the block before does
            return self._shifted(died, self.below, self.backward, copy - 1)
        if in_forward or in_backward:
            return self.moved(died, copy)
        if block.born >= self.after and self.backward <= died < self.below:
            return self.moved(died, more)  # from the block behind: the last copy's backward is the first to run
        return self.moved(died, 0)

    def _shifted(self, tick: int, begin: int, own: int, copy: int) -> int:
        """Return the tick of a copy's forward or backward, which begins at `own`, as far from there as from `begin`.

        What is farther away than either is long does not happen in that copy.
        """
        length = self.after - self.forward if own == self.forward else self.below - self.backward
        return self.moved(own + tick - begin, copy) if tick - begin < length else self.moved(tick, 0)


def same_memory(one: StepRecord, other: StepRecord) -> bool:
    """Return whether two records have the same moments and work, and as much allocated at each tick."""
    if len(one.blocks) != len(other.blocks) or one.works != other.works:
        return False
    moments = (
        [(tick, moment._replace(parameter=-1, module=-1)) for tick, moment in each.moments] for each in (one, other)
    )
    return next(moments) == next(moments) and bool(np.array_equal(one.levels, other.levels))
