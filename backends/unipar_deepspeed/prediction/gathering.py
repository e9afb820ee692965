"""Gathering of stage 3: which parameters are whole when, as DeepSpeed's coordinator decides in the order of modules."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil
from typing import Literal, final

from unipar.prediction.timeline import StepTimeline, Term
from unipar_deepspeed.prediction.swapped import SwappedParameters, SwapReads
from unipar_deepspeed.prediction.zero_model import SentBytes, ZeroModel

NEVER = -1


@dataclass(frozen=True)
class ModuleUse:
    """A module is called or returns, or a gradient of its output arrives, or it is done in backward."""

    at: int
    what: Literal["fetch", "release"]
    module: int
    forward: bool


ROOT = -1
"""Number of the module around the model, which calls the loss."""


def module_uses(timeline: StepTimeline) -> list[ModuleUse]:
    """Return when modules are fetched for and released, in a microbatch.

    In backward a module is released after the last gradient of its parameters, or before the next module: it is done
    when the gradient of its input is there. One whose input takes no gradient is released when all is over.
    """
    uses = [ModuleUse(timeline.at("forward"), "fetch", ROOT, forward=True)]
    gradients: dict[int, int] = {}
    for at, moment in enumerate(timeline.moments):
        if moment.what == "begin" and moment.phase == "backward":
            uses.append(ModuleUse(at, "release", ROOT, forward=True))
            uses.append(ModuleUse(at, "fetch", ROOT, forward=False))
        elif moment.what in ("call", "return"):
            uses.append(ModuleUse(at, "fetch" if moment.what == "call" else "release", moment.module, forward=True))
        elif moment.what == "arrive":
            uses.append(ModuleUse(at, "fetch", moment.module, forward=False))
        elif moment.what == "taken":
            gradients[moment.parameter] = at
    arrivals = [use.at for use in uses if use.what == "fetch" and not use.forward]
    end = timeline.at("backward", "finish")
    released: list[ModuleUse] = []
    owners = Counter(n for module in timeline.modules for n in module.parameters)
    shared = {n for n, times in owners.items() if times > 1}  # complete when all its modules are done
    for use in uses:
        if use.forward or use.module == ROOT:
            continue
        module = timeline.modules[use.module]
        own = [gradients[n] for n in module.parameters if n not in shared and gradients.get(n, -1) >= use.at]
        after = bisect_left(arrivals, use.at + 1)
        done = max(own) if own else arrivals[after] if after < len(arrivals) else end
        released.append(ModuleUse(done if module.passes_gradient else end, "release", use.module, forward=False))
    return sorted([*uses, *released], key=lambda use: (use.at, use.what == "fetch"))


@dataclass
class _Gathered:
    """Parameters that one all-gather brings; several of them are copied out of a flat tensor."""

    flat: int
    """Bytes of the flat tensor; 0 if one parameter's own memory is what is gathered into."""

    since: int
    left: set[int]
    """Parameters that no module has waited for yet; the flat tensor stays until there are none."""

    copied: bool = False


@final
class GatherPlan:
    """Gathered parameters of a microbatch, after the first steps, in which DeepSpeed learns the order of modules."""

    def __init__(self, model: ZeroModel, sent: SentBytes, *, first: GatherPlan | None = None) -> None:
        """`first`: plan of the first microbatch after the order was learned, whose decisions DeepSpeed remembers.

        It has the same timeline, and no parameter is whole when it begins.
        """
        self.kept: dict[tuple[int, int], frozenset[int]] = {} if first is None else first.kept
        """Parameters that stay whole when a module is done, by module and number of fetches before."""

        self._model, self._timeline, self._sent = model, model.timeline, sent
        self._parameters = model.parameters
        self.persistent = frozenset(n for n, p in enumerate(self._parameters) if p.numel <= model.persistence)
        self._uses = module_uses(self._timeline) if first is None else first._uses
        order = [self._own(use.module) for use in self._uses if use.what == "fetch"]
        self._order = order
        self._traversed = [0, *accumulate(sum(self._parameters[n].numel for n in own) for own in order)]
        self._steps_of: dict[int, list[int]] = {}
        for step, own in enumerate(order):
            for number in own:
                self._steps_of.setdefault(number, []).append(step)
        self._queue = deque((number, step) for step, own in enumerate(order) for number in sorted(own))
        self._fetched_for: dict[int, int] = {}
        self._step = self._live = 0
        self._gathered: dict[int, tuple[int, int]] = dict.fromkeys(self.persistent, (0, 0))
        """Parameters that are whole, each with the moment since when it has that memory, and its bytes."""

        self._reads = SwapReads(model, SwappedParameters(model).read if model.parameters_on_disk else ())
        self._flying: dict[int, _Gathered] = {}
        self._active: dict[int, set[int]] = {}
        self.terms: list[Term] = []

    def _own(self, module: int) -> tuple[int, ...]:
        return () if module == ROOT else self._timeline.modules[module].parameters

    def padded_bytes(self, number: int) -> int:
        """Return the bytes of a parameter as it is gathered: its elements made a multiple of the number of ranks."""
        ranks = self._model.ranks
        return ceil(self._parameters[number].numel / ranks) * ranks * self._model.element_of(number)

    def run(self, *, first: bool = False) -> GatherPlan:
        """Go through a microbatch, and note what is held and sent; `first`: nothing is whole when it begins."""
        if first:
            self._gathered.clear()
        for use in self._uses:
            if use.what == "fetch":
                self._fetch(use)
            else:
                self._release(use)
        end = self._timeline.at("update")
        for number in list(self._gathered):
            self._drop(number, end, forward=False)
        for flying in {id(f): f for f in self._flying.values()}.values():
            self.terms.append(Term("communication", "gathered, flat", flying.flat, flying.since, end))
        return self

    def _fetch(self, use: ModuleUse) -> None:
        own = self._own(use.module)
        self._gather([n for n in own if n not in self._gathered and n not in self._flying], use.at)
        for number in own:
            self._active.setdefault(number, set()).add(use.module)
            if number in self._flying:
                self._wait(number, use.at)
        self._take_from_queue(own)
        self._prefetch(use.at)
        self._step += 1

    def _take_from_queue(self, own: Iterable[int]) -> None:
        """Take parameters that are fetched now out of the queue; those that were prefetched are out already."""
        if not own:
            return
        missing = {n for n in own if self._fetched_for.get(n, NEVER) < self._step}
        taken = set[int]()
        while self._queue and len(taken) < len(missing):
            number, step = self._queue.popleft()
            self._fetched_for[number] = step
            taken.add(number)

    def _prefetch(self, at: int) -> None:
        if not self._queue or not self._model.prefetch:
            return
        most = min(self._model.live - self._live, self._model.prefetch)
        ahead, elements = dict[int, None](), 0  # in order, and quick to look into
        while self._queue and elements < most and not self._reads.is_away(self._queue[0][0]):
            number, step = self._queue.popleft()
            self._fetched_for[number] = max(self._fetched_for.get(number, NEVER), step)
            if number not in self._gathered and number not in self._flying and number not in ahead:
                ahead[number] = None
                elements += self._parameters[number].numel
        self._gather(list(ahead), at)
        if self._model.parameters_on_disk:
            gathering = sum(self._parameters[number].numel for number in self._flying)
            self._reads.ahead([number for number, _ in self._queue], gathering)

    def _gather(self, numbers: Sequence[int], at: int) -> None:
        if numbers:
            self._reads.need(numbers)
        for element in sorted({self._model.element_of(n) for n in numbers}):
            self._gather_alike([n for n in numbers if self._model.element_of(n) == element], at)

    def _gather_alike(self, numbers: Sequence[int], at: int) -> None:
        """Gather parameters of one dtype, all in one call."""
        size = sum(self.padded_bytes(n) for n in numbers)
        self._live += sum(self._parameters[n].numel for n in numbers)
        self._sent.add("all_gather", size)
        alone = len(numbers) == 1 or self._model.ranks == 1
        gathered = _Gathered(0 if alone else size, at, set(numbers))
        for number in numbers:
            self._flying[number] = gathered
            if number in self.persistent:
                self._reads.let_go(number)
        if self._model.host == "host" and self._model.parameters_offloaded and self._model.ranks > 1:
            # a partition moves to the device to be sent
            moved = size // self._model.ranks
            self.terms.append(Term("communication", "partitions, from the host", moved, at, at + 1))
        if self._model.staged:
            self.terms.append(Term("communication", "gathered, staged", size, at, at + 1))

    def _wait(self, number: int, at: int) -> None:
        gathered = self._flying.pop(number)
        gathered.left.discard(number)
        if not gathered.copied:
            gathered.copied = True
            for n in (number, *gathered.left):
                padded = gathered.since, self.padded_bytes(n)
                self._gathered[n] = (at, self._model.bytes_of(n)) if gathered.flat else padded
        if not gathered.left and gathered.flat:
            self.terms.append(Term("communication", "gathered, flat", gathered.flat, gathered.since, at + 1))

    def _release(self, use: ModuleUse) -> None:
        key = use.module, self._step
        if key not in self.kept:
            self.kept[key] = frozenset(n for n in self._own(use.module) if self._is_kept(n))
        keep = self.kept[key]
        for number in self._own(use.module):
            active = self._active.setdefault(number, set())
            active.discard(use.module)
            if not active and number in self._gathered and number not in self._flying and number not in keep:
                self._drop(number, use.at, forward=use.forward)

    def _is_kept(self, number: int) -> bool:
        """Return whether a parameter stays whole: it is small, or used again soon, or was passed over by a prefetch."""
        if number in self.persistent or self._fetched_for.get(number, NEVER) > self._step:
            return True
        steps = self._steps_of[number]
        place = bisect_left(steps, self._step)
        if place == len(steps):
            return False
        return self._traversed[steps[place]] - self._traversed[self._step] < self._model.reuse

    def _drop(self, number: int, at: int, *, forward: bool) -> None:
        """Free a parameter's memory, which stays until its gradient is there if autograd keeps a view of it."""
        p, (since, size) = self._parameters[number], self._gathered.pop(number)
        self._reads.let_go(number)
        if number not in self.persistent:
            self._live -= p.numel
        elif at >= self._timeline.at("update"):
            return  # persistent: a term of its own
        viewed = p.viewed if at <= self._timeline.at("backward") else p.viewed_again
        held = forward and viewed and at < self._timeline.at("backward", "finish")
        until = max(at, self._timeline.gradient_at(number)) if held else at
        self.terms.append(Term("communication", f"{p.name}, gathered", size, since, until))


def persistent_terms(plan: GatherPlan, model: ZeroModel, sent: SentBytes) -> Iterator[Term]:
    """Yield the parameters that stay whole, which are gathered once, after the update."""
    for number in sorted(plan.persistent):
        size = plan.padded_bytes(number)
        sent.add("all_gather", size)
        yield Term("communication", f"{model.parameters[number].name}, whole", size)
