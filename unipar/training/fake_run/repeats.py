"""Blocks that are equal: three or five of them run on fake tensors, and their record is that of any number."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, final

import numpy as np
from torch import nn

from unipar.prediction.timeline import Moment
from unipar.training.fake_run.step_recorder import FakeBlock, StepRecord

ENDS = (1, 2)
"""Numbers of equal blocks that run on each side of one for all between; more if fewer do not stand for the others."""

_POSITIONS = ("idx", "index", "number", "layer_id")
"""Ends of names of attributes that tell a block its place, and nothing about what it computes."""


@dataclass(frozen=True)
class EqualBlocks:
    """Neighbours in one container, which are blocks with the same modules, shapes and settings."""

    container: str
    keys: tuple[str, ...]
    first: int
    """Number among the model's blocks of the first that belongs to them."""

    inner: tuple[str, ...] = ()
    """Names, in each of them, of further blocks: they come before it."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all of them."""
        return tuple(f"{self.container}.{key}" if self.container else key for key in self.keys)

    @property
    def each(self) -> int:
        """Number of blocks that one of them is, with those inside."""
        return len(self.inner) + 1

    def middle(self, ends: int, middle: int) -> range:
        """Return the places of those that are left out if some run at the ends, and `middle` of those between."""
        return range(ends + middle, len(self.keys) - ends)


def find_equal_blocks(model: nn.Module, blocks: Sequence[str]) -> list[EqualBlocks]:
    """Return neighbours in containers that are more equal blocks than need to run at least.

    Their parameters are in no other module. Other children of a container are other blocks, or none.
    """
    users: dict[int, int] = {}
    for module in model.modules():
        for p in module.parameters(recurse=False):
            users[id(p)] = users.get(id(p), 0) + 1
    numbers = {name: number for number, name in enumerate(blocks)}
    equal_blocks: list[EqualBlocks] = []
    for container in dict.fromkeys(name.rpartition(".")[0] for name in blocks):
        parent = model.get_submodule(container)
        if not isinstance(parent, nn.ModuleList | nn.Sequential):
            continue

        def kind(child: tuple[str, nn.Module], container: str = container) -> Any:
            name = f"{container}.{child[0]}" if container else child[0]
            alone = name in numbers and all(users[id(p)] == 1 for p in child[1].parameters())
            return (_inner(name, blocks), _signature(child[1])) if alone else None

        for found, children in groupby(parent.named_children(), kind):
            keys = tuple(key for key, _ in children)
            if found is None or len(keys) <= 2 * ENDS[0] + 2:
                continue
            equal = EqualBlocks(container, keys, 0, found[0])
            equal = replace(equal, first=numbers[equal.names[0]] - len(equal.inner))
            in_order = [f"{name}.{inner}" if inner else name for name in equal.names for inner in (*equal.inner, "")]
            if list(blocks[equal.first :][: len(in_order)]) == in_order:
                equal_blocks.append(equal)
    return equal_blocks


def _inner(name: str, blocks: Sequence[str]) -> tuple[str, ...]:
    """Return the names that blocks inside of a block have in it."""
    return tuple(block.removeprefix(f"{name}.") for block in blocks if block.startswith(f"{name}."))


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
    """A model in which only some of equal blocks are there, by their names, for as long as it is open."""

    def __init__(
        self, model: nn.Module, blocks: Sequence[str], equal: Sequence[EqualBlocks], ends: int, middle: int = 1
    ) -> None:
        """`ends`: how many of equal blocks run on each side of `middle` between."""
        self.model = model
        self.equal = [each for each in equal if each.middle(ends, 2)]
        self.ends, self.between = ends, middle
        self._all_blocks = tuple(blocks)
        self._parameters: tuple[str, ...] = ()
        self._modules: tuple[str, ...] = ()
        self.left_out = frozenset(
            self._all_blocks[each.first + place * each.each + number]
            for each in self.equal
            for place in each.middle(ends, middle)
            for number in range(each.each)
        )
        """Names of the blocks that are not there."""

    @property
    def blocks(self) -> tuple[str, ...]:
        """Names of the blocks that are there."""
        return tuple(name for name in self._all_blocks if name not in self.left_out)

    @contextmanager
    def open(self) -> Generator[None]:
        """Context manager: leave blocks out, and put them back."""
        with ExitStack() as stack:
            for container in dict.fromkeys(each.container for each in self.equal):
                stack.enter_context(self._without_blocks(container))
            self._parameters = tuple(name for name, _ in self.model.named_parameters())
            self._modules = tuple(name for name, _ in self.model.named_modules())
            yield

    @contextmanager
    def _without_blocks(self, container: str) -> Generator[None]:
        """Context manager: a container has the others under their names, and counts them from 0."""
        module: Any = self.model.get_submodule(container)
        kind, children = type(module), dict(module._modules)
        own = [each for each in self.equal if each.container == container]
        left_out = {each.keys[place] for each in own for place in each.middle(self.ends, self.between)}

        def child(this: Any, place: Any) -> Any:
            return list(this._modules.values())[place] if isinstance(place, int) else kind.__getitem__(this, place)

        module._modules = {key: each for key, each in children.items() if key not in left_out}
        module.__class__ = type(kind.__name__, (kind,), {"__getitem__": child})
        try:
            yield
        finally:
            module.__class__, module._modules = kind, children

    def stands_for(self, longer: ShortModel, record: StepRecord, expected: StepRecord) -> bool:
        """Return whether its record leads to that of a model with more of the blocks."""
        return same_memory(self._repeated(record, longer.between), expected)

    @property
    def same_left_out(self) -> int | None:
        """Number of equal blocks that are left out, if it is the same wherever there are some; else None."""
        numbers = {len(each.middle(self.ends, self.between)) for each in self.equal}
        return numbers.pop() if len(numbers) == 1 else None

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

    def _repeated(self, record: StepRecord, between: int | None) -> StepRecord:
        """Return the record of a model with this many of the blocks between those at the ends, or with all."""
        for equal in reversed(self.equal):
            middle = self.blocks.index(equal.names[self.ends])
            count = between or len(equal.middle(self.ends, 0))
            record = repeat_block(record, middle, count, equal.each)
        return record

    def _name_in_whole(self, name: str, block: int) -> str:
        """Return the name that a parameter or a module of the short model has in a block of the whole one."""
        for equal in self.equal:
            place = (block - equal.first) // equal.each
            if 0 <= place < len(equal.keys):
                start = f"{equal.container}." if equal.container else ""
                _, dot, rest = name.removeprefix(start).partition(".")
                return f"{equal.names[place]}{dot}{rest}"
        return name

    def _name_in_short(self, name: str) -> str:
        """Return the name, in the short model, of what stands for a parameter or a module of the whole one."""
        for equal in self.equal:
            start = f"{equal.container}." if equal.container else ""
            key, dot, rest = name.removeprefix(start).partition(".")
            if name.startswith(start) and key in equal.keys:
                place = equal.keys.index(key)
                place = self.ends if place in equal.middle(self.ends, 0) else place
                return f"{equal.names[place]}{dot}{rest}"
        return name


def repeat_block(record: StepRecord, block: int, count: int, each: int = 1) -> StepRecord:
    """Return a record in which a block, of one that runs after another equal one, has run `count` times in a row.

    It and its neighbours are the last of `each` blocks, of which others are inside. Raise KeyError if its forward or
    backward has no beginning, or if they do not lie between those of its neighbours.
    """
    places = {moment[:3]: tick for tick, moment in record.moments}
    ahead = [places["forward", "reach", number] for number in (block, block + each)]
    behind = [places["backward", "reach", number] for number in (block + each, block, block - each)]
    if (ticks := [*ahead, *behind]) != sorted(ticks):
        raise KeyError(block)
    period = _Period(ahead[0], ahead[1], behind[0], behind[1], behind[2], count, each)
    blocks = [
        replace(memory, born=period.moved(memory.born, copy), died=period.death(memory, copy))
        for memory in record.blocks
        for copy in period.copies(memory.born)
    ]
    moments = [
        (period.moved(tick, copy), period.numbered(tick, moment, block, copy), work)
        for (tick, moment), work in zip(record.moments, record.works, strict=True)
        for copy in period.copies(tick)
    ]
    blocks.sort(key=lambda memory: memory.born)
    moments.sort(key=lambda moment: moment[0])
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
    each: int
    """Number of blocks that it is, with those inside."""

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
        more = (self.count - 1) * self.each
        if moment.block < 0:
            return moment
        if self.forward <= tick < self.after or self.backward <= tick < self.below:
            return moment._replace(block=moment.block + copy * self.each)
        last = self.after <= tick < self.backward  # from there the last copy is the next
        own = block - self.each < moment.block <= block
        return moment._replace(block=moment.block + (more if moment.block > block or (last and own) else 0))

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
