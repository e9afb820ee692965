"""Recorder of a fake step: each block of memory with the operation that made it, and the moments between them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary
from typing_extensions import override

from unipar.planning.activations import CopyOnCPU
from unipar.planning.cpu_copies import copies_in_operation
from unipar.prediction.timeline import MemoryPlace, Moment, MomentKind, PredictedPhase
from unipar.profiling.flops import count_operations


@dataclass(slots=True)
class FakeBlock:
    """One block of memory that a step allocates."""

    size: int
    operation: str
    where: str
    """Name of the innermost module that ran; empty outside of modules, as in backward."""

    born: int
    """Tick at which it was allocated."""

    died: int | None = None
    """Last tick at which it was there; None: it was still there at the end."""

    is_gradient: bool = False
    """True if it became the gradient of a parameter, when it died."""

    copied_by: CopyOnCPU | None = None
    """Library that makes it, if it is a copy that is made on the CPU alone."""

    place: MemoryPlace = "device"


class Work(NamedTuple):
    """Counts of what was computed."""

    flops: int
    """Operations on numbers."""

    recomputed: int
    """Those of them that backward did again."""

    operators: int
    """Operators that made something."""


def levels_of(blocks: Sequence[FakeBlock], ticks: int) -> Any:
    """Return the bytes that are allocated on the device at each of this many ticks."""
    changes = np.zeros(ticks + 1, dtype=np.int64)
    for block in (block for block in blocks if block.place == "device"):
        changes[block.born] += block.size
        if block.died is not None:
            changes[block.died + 1] -= block.size
    return np.cumsum(changes)


@dataclass(frozen=True)
class StepRecord:
    """All that a step allocates, and its moments, each with its tick."""

    blocks: tuple[FakeBlock, ...]
    moments: tuple[tuple[int, Moment], ...]
    works: tuple[Work, ...]
    """Work between the moment before and each moment."""

    passing: frozenset[str]
    """Names of the modules of which an input takes a gradient."""

    viewed: frozenset[str]
    """Names of the parameters of which autograd keeps a view from forward to backward."""

    viewed_again: frozenset[str]
    """Names of those of which it keeps one when a module has been computed again in backward."""

    @property
    def levels(self) -> Any:
        """Bytes that are allocated at each tick."""
        return levels_of(self.blocks, len(self.blocks) + len(self.moments))

    @property
    def work(self) -> Work:
        """Work of the whole step."""
        return Work(*map(sum, zip(*self.works, strict=True)))


@final
class StepRecorder(TorchDispatchMode):
    """Mode that records what operations allocate, until nothing refers to it any more.

    Time is counted in ticks: each allocation and each moment is one. In which order memory is freed between two of them
    does not matter.
    """

    def __init__(self, kept: Iterable[Tensor]) -> None:
        """`kept`: tensors that are there before and after the step, which are not recorded."""
        super().__init__()
        self._works = [Work(0, 0, 0)]
        self.blocks: list[FakeBlock] = []
        self.moments: list[tuple[int, Moment]] = []
        """Moments, each with its tick."""

        self.phase: PredictedPhase = "forward"
        self.ticks = 0
        self._kept = {_key(t) for t in kept}
        self._live: dict[int, int] = {}
        self._modules: list[str] = []
        self._work = Work(0, 0, 0)

        self._passing: set[str] = set()
        self._viewed: frozenset[str] = frozenset()
        self._parameters: dict[int, str] = {}
        self._views: list[tuple[str, weakref.ref[Tensor]]] = []
        self._viewed_again: set[str] = set()
        self._arriving: Any = WeakIdKeyDictionary()
        self._sums: dict[int, tuple[int, int]] = {}

    @classmethod
    @override
    def is_infra_mode(cls) -> bool:
        """Return True: torch.compile's code runs under it as it does without it."""
        return True

    def keep(self, t: Tensor) -> None:
        """Count a tensor no longer: it is there before and after the step."""
        number = self._live.pop(_key(t), None)
        if number is not None:
            self.blocks[number].size = 0
        self._kept.add(_key(t))

    def keep_sums(self, model: nn.Module, blocks: Sequence[str]) -> None:
        """Count the gradients that are there no longer; each is complete when another is added to it."""
        owners = owners_of_parameters(model, blocks)
        for number, (name, p) in enumerate(model.named_parameters()):
            if p.grad is not None:
                self.keep(p.grad)
                self._sums[_key(p.grad)] = number, owners.get(name, -1)

    def begin(self, phase: PredictedPhase) -> None:
        """Note that a phase begins; in backward, a library may act before the loss's gradient is there."""
        if phase == "backward":
            self._viewed = self._views_that_are_kept()
        self.phase = phase
        self.note("begin")
        if phase == "backward":
            self._note_both("reach", "enter", -1)

    def note(self, what: MomentKind, block: int = -1, parameter: int = -1, module: int = -1) -> None:
        """Note a moment; what was in a cycle of references until then is freed, as it would be without fake tensors."""
        if module < 0:
            gc.collect()
        self.moments.append((self.ticks, Moment(self.phase, what, block, parameter, module)))
        self._works.append(self._work)
        self.ticks += 1

    def record(self) -> StepRecord:
        """Return what was recorded until now."""
        works = [Work(*(b - a for a, b in zip(*both, strict=True))) for both in pairwise(self._works)]
        return StepRecord(
            tuple(self.blocks),
            tuple(self.moments),
            tuple(works),
            frozenset(self._passing),
            self._viewed,
            frozenset(self._viewed_again),
        )

    def _note_both(self, before: MomentKind, after: MomentKind, block: int) -> None:
        self.note(before, block)
        self.note(after, block)

    def _views_that_are_kept(self) -> frozenset[str]:
        """Return the names of parameters of which there are views, and forget the views."""
        kept = frozenset(name for name, view in self._views if view() is not None)
        self._views.clear()
        return kept

    def take_gradient(self, gradient: Tensor) -> None:
        """Count a block no longer: it has become a gradient, which the backend's terms count."""
        number = self._live.pop(_key(gradient), None)
        if number is not None:
            self.blocks[number].is_gradient = True
            self._end(number)

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.is_inference_mode_enabled() and func is not torch.ops.prim.device.default:
            with self:  # there, torch hands over whole what it otherwise takes apart, such as linear
                parts = func.decompose(*args, **(kwargs or {}))
            if parts is not NotImplemented:
                return parts
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # such as states in blocks: what they do with the tensors inside is seen instead
        out = func(*args, **(kwargs or {}))
        self._count(func, args, kwargs or {}, out)
        place: MemoryPlace = "host" if (kwargs or {}).get("pin_memory") else "device"
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, Tensor):
                self._see(t, func, place)
        if func is torch.ops.aten.add_.Tensor and (sum_of := self._sums.pop(_key(args[0]), None)) is not None:
            number, block = sum_of
            self.note("gradient", block, number)
            self.note("taken", block, number)
        for size, name, made_by in copies_in_operation(func, args, out):
            self.blocks.append(FakeBlock(size, name, self._where, self.ticks, self.ticks, copied_by=made_by))
            self.ticks += 1
        return out

    def _count(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Add a call to the work; what backward records is computed again, and not what it computes itself."""
        if func.namespace == "prim":  # a question to a tensor, such as its device
            return
        flops, recomputed, operators = self._work
        more = count_operations(func, args, kwargs, out) or 0
        again = self.phase == "backward" and torch.is_grad_enabled()
        self._work = Work(flops + more, recomputed + more * again, operators + (not func.is_view))

    @property
    def _where(self) -> str:
        """Name of the module that runs."""
        return self._modules[-1] if self._modules else ""

    def _see(self, t: Tensor, func: Any, place: MemoryPlace) -> None:
        if t.device.type == "meta":
            return  # a shape to compute with: it has no memory in a training either
        storage = t.untyped_storage()
        key = _key(t)
        if key in self._live or key in self._kept:
            if key in self._parameters:
                self._views.append((self._parameters[key], weakref.ref(t)))
            return
        number = len(self.blocks)
        self.blocks.append(FakeBlock(storage.nbytes(), func.__name__, self._where, self.ticks, place=place))
        self.ticks += 1
        self._live[key] = number
        weakref.finalize(storage, self._gone, key, number)

    def _gone(self, key: int, number: int) -> None:
        if self._live.get(key) == number:
            del self._live[key]
            self._end(number)

    def _end(self, number: int) -> None:
        self.blocks[number].died = self.ticks - 1

    @contextmanager
    def follow(self, model: nn.Module, blocks: Sequence[str]) -> Generator[None]:
        """Context manager: note when a block is entered and left, and when a parameter's gradient is complete."""
        handles: list[Any] = []
        numbers = {name: number for number, name in enumerate(blocks)}
        self._parameters = {_key(p): name for name, p in model.named_parameters()}
        for place, (name, module) in enumerate(model.named_modules()):
            block = next((number for part, number in numbers.items() if f"{name}.".startswith(f"{part}.")), -1)
            handles.append(module.register_forward_pre_hook(self._calling(place, name, block)))
            handles.append(module.register_forward_hook(self._returning(place, block)))
            handles.append(module.register_forward_pre_hook(_pusher(self._modules, name)))
            handles.append(module.register_forward_hook(_popper(self._modules), always_call=True))
            if name in numbers:
                handles.append(module.register_forward_pre_hook(self._entering(numbers[name]), with_kwargs=True))
                handles.append(module.register_forward_hook(self._leaving(numbers[name])))
        owners = owners_of_parameters(model, blocks)
        for number, (name, p) in enumerate(model.named_parameters()):
            if p.requires_grad:
                handles.append(p.register_post_accumulate_grad_hook(self._completing(number, owners.get(name, -1))))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _calling(self, number: int, name: str, block: int) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            self.note("call", block, module=number)
            if any(isinstance(x, Tensor) and x.requires_grad for x in tree_leaves(args)):
                self._passing.add(name)

        return hook

    def _returning(self, number: int, block: int) -> Any:
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            if self.phase == "backward":
                self._viewed_again |= self._views_that_are_kept()
            self.note("return", block, module=number)
            for x in tree_leaves(out):
                if not (isinstance(x, Tensor) and x.requires_grad):
                    continue
                if x in self._arriving:  # the output of a module in it: the outer one is told first
                    self._arriving[x].append((number, block))
                else:
                    self._arriving[x] = [(number, block)]
                    x.register_hook(self._arrival(self._arriving[x]))

        return hook

    def _arrival(self, modules: list[tuple[int, int]]) -> Any:
        def hook(gradient: Tensor) -> None:
            for number, block in reversed(modules):
                self.note("arrive", block, module=number)

        return hook

    def _entering(self, block: int) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if self.phase != "forward":  # recomputed
                return None
            self._note_both("reach", "enter", block)
            wanted = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.requires_grad]
            if not wanted or not torch.is_grad_enabled():
                return None
            passed: Any = TellBackward.apply(lambda: self._note_both("finish", "leave", block), *wanted)
            made = {id(x): y for x, y in zip(wanted, passed, strict=True)}

            def replaced(x: Any) -> Any:
                return made.get(id(x), x)

            return tree_map(replaced, (args, kwargs))

        return hook

    def _leaving(self, block: int) -> Any:
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            if self.phase != "forward":
                return
            self._note_both("finish", "leave", block)

            def arrived(gradient: Tensor) -> None:
                self._note_both("reach", "enter", block)

            for x in tree_leaves(out):
                if isinstance(x, Tensor) and x.requires_grad:
                    x.register_hook(arrived)

        return hook

    def _completing(self, number: int, block: int) -> Any:
        def hook(p: Tensor) -> None:
            assert p.grad is not None
            self.take_gradient(p.grad)
            self.note("gradient", block, number)
            self.note("taken", block, number)

        return hook


class TellBackward(torch.autograd.Function):
    """Identity that tells when the gradients of all that passed are there."""

    @staticmethod
    @override
    def forward(ctx: Any, tell: Any, *xs: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.tell = tell
        return tuple(x.view_as(x) for x in xs)

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.tell()
        return None, *gradients


def _key(t: Tensor) -> int:
    storage: Any = t.untyped_storage()
    return storage._cdata


def _pusher(modules: list[str], name: str) -> Any:
    def hook(module: nn.Module, args: Any) -> None:
        modules.append(name)

    return hook


def _popper(modules: list[str]) -> Any:
    def hook(module: nn.Module, args: Any, out: Any) -> None:
        if modules:
            modules.pop()

    return hook


def owners_of_parameters(model: nn.Module, blocks: Sequence[str]) -> Mapping[str, int]:
    """Return the number of the first block in which a parameter is, by its name."""
    starts = [(f"{name}.", number) for number, name in enumerate(blocks)]
    owners: dict[str, int] = {}
    for start, number in starts:
        for name, _ in model.named_parameters():
            if name.startswith(start):
                owners.setdefault(name, number)
    return owners
