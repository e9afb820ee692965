"""Tensor parallelism of one block at run time: plain local parameters, and two sums in forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Final, cast, final

import torch.distributed as dist
from torch import Tensor, nn

from unipar_mesh.sequence.sequence_parts import BlockParts, hook_parts, unwrap_parts, wrap_parts
from unipar_mesh.tensor.cuts import BlockPlan, Rewrite, is_transposed
from unipar_mesh.tensor.multihead_attention import attend_with_parts
from unipar_mesh.tensor.rewrites import PartCalls
from unipar_mesh.tensor.sites import run_block
from unipar_mesh.tensor.sum_collectives import enter, leave

Undo = Callable[[], None]
"""Function that takes one change to a module back."""


def arm_block(
    block: nn.Module,
    plan: BlockPlan,
    group: dist.ProcessGroup | None,
    *,
    rank: int | None = None,
    watch: Callable[[nn.Module, Any], Any] | None = None,
    sites: SitesOfCall | None = None,
) -> list[Undo]:
    """Make a block, whose cut parameters are this rank's parts already, compute what the whole block does.

    Forward and backward then communicate over `group`. `watch`: another maker of the mode (a trial's). `sites`: which
    calls to rewrite when the block is called with these arguments; None: those of the plan, whatever it is given.
    """
    seat = dist.get_rank(group) if rank is None else rank
    entered = _Entered(group)
    undo: list[Undo] = []
    sequence = plan.sequence
    parts = None if sequence is None else BlockParts(sequence, plan.ranks, seat, group)
    for name, cut in plan.cuts.items():
        module: Any = block.get_submodule(name)
        if isinstance(module, nn.MultiheadAttention):
            undo.append(replace_forward(module, _attention(module, group, plan.ranks, seat, parts, name)))
        elif isinstance(block.get_submodule(name.rpartition(".")[0]), nn.MultiheadAttention):
            continue  # the output projection of the one above
        elif cut.kind == "column":
            if is_transposed(module):
                undo.append(_set(module, "nf", module.nf // plan.ranks))
            dim = None if sequence is None else sequence.gathered.get(name, (None,))[0]
            undo.append(replace_forward(module, _column(module, entered, parts, dim)))
        else:
            dim = None if sequence is None else sequence.scattered.get(name)
            undo.append(replace_forward(module, _row(module, group, parts, dim)))
    for name in () if sequence is None else sequence.on_parts:
        module = block.get_submodule(name)
        undo.append(replace_forward(module, _on_part(module, group)))
    undo += [] if group is None or parts is None else hook_parts(block)
    mode: Any = PartCalls(block, plan.sites, seat, plan.ranks, group)
    if watch is not None:
        mode = watch(block, mode)
    calls = _RewrittenCalls(block, mode, undo, sites, everywhere=watch is not None)
    undo.append(_wrap(block, entered, calls, parts))
    return undo


SitesOfCall = Callable[[tuple[Any, ...], Mapping[str, Any]], Mapping[str, tuple[Rewrite, ...]]]
"""Function that returns the calls to rewrite in a block that gets these arguments."""


@final
class _RewrittenCalls:
    """Mode of a block's calls, on only within the modules that make one: there each costs some microseconds."""

    def __init__(
        self, block: nn.Module, mode: Any, undo: list[Undo], sites: SitesOfCall | None, *, everywhere: bool
    ) -> None:
        """`undo` gets what takes changes to modules back; `everywhere`: the mode is on in all of the block."""
        self.mode, self._block, self._sites, self._undo = mode, block, sites, undo
        self._names = {name for name, _ in block.named_modules()} - {""}
        self._wrapped: set[str] = set()
        self._always = everywhere
        self._wrap_modules()

    def take_arguments(self, args: Any, kwargs: Any) -> None:
        """Rewrite what calls with these arguments need."""
        if self._sites is not None and self.mode.take(self._sites(args, kwargs)):
            self._wrap_modules()

    @contextmanager
    def around_block(self) -> Generator[None]:
        """Context manager for the block's forward."""
        if not self._everywhere:
            yield
            return
        self.mode.active = True
        try:
            with self.mode:
                yield
        finally:
            self.mode.active = False

    @property
    def _everywhere(self) -> bool:
        return self._always or not self.mode.modules <= self._names

    def _wrap_modules(self) -> None:
        if not self._everywhere:
            for name in self.mode.modules - self._wrapped:
                module = self._block.get_submodule(name)
                self._undo.append(replace_forward(module, self._within(module.forward)))
                self._wrapped.add(name)

    def _within(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            mode = self.mode
            if mode.active:  # a module around this one
                return plain(*args, **kwargs)
            mode.active = True
            try:
                with mode:
                    return plain(*args, **kwargs)
            finally:
                mode.active = False

        return forward


@final
class _Entered:
    """Whole inputs of this forward that columns have taken: those that several take are summed up once."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._known: dict[int, tuple[Tensor, Tensor]] = {}

    def of(self, x: Tensor) -> Tensor:
        known = self._known.get(id(x))
        if known is None or known[0] is not x:
            known = self._known[id(x)] = (x, enter(x, self._group, alone=True))
        return known[1]

    def clear(self) -> None:
        self._known.clear()


def _column(module: Any, entered: _Entered, parts: BlockParts | None, dim: int | None) -> Callable[[Tensor], Tensor]:
    plain = module.forward

    def forward(x: Tensor) -> Tensor:
        if parts is not None and dim is not None:
            return parts.gathered(x, dim).use(plain)
        return plain(entered.of(x))

    return forward


def _row(
    module: Any, group: dist.ProcessGroup | None, parts: BlockParts | None, dim: int | None
) -> Callable[[Tensor], Tensor]:
    plain, transposed = module.forward, is_transposed(module)

    def added_up(out: Tensor, bias: Tensor | None) -> Tensor:
        if parts is None or dim is None:
            return _biased(leave(out, group), bias)
        return _biased(parts.scattered(out, dim), None if bias is None else enter(bias, group))

    def forward(x: Tensor) -> Tensor:
        bias = module._parameters.get("bias")
        if transposed:
            return added_up(x @ module.weight, bias)
        module._parameters["bias"] = None  # every rank would add it
        try:
            out = plain(x)
        finally:
            module._parameters["bias"] = bias
        return added_up(out, bias)

    return forward


def _on_part(module: Any, group: dist.ProcessGroup | None) -> Callable[[Tensor], Tensor]:
    """Return the forward of a whole matrix on a part of the sequence: its gradient is added up over the ranks."""
    plain = module.forward

    def forward(x: Tensor) -> Tensor:
        own = dict(module._parameters)
        module._parameters.update({key: None if p is None else enter(p, group) for key, p in own.items()})
        try:
            return plain(x)
        finally:
            module._parameters.update(own)

    return forward


def _biased(out: Tensor, bias: Tensor | None) -> Tensor:
    return out if bias is None else out + bias.to(out.dtype)


def _attention(
    module: Any, group: dist.ProcessGroup | None, ranks: int, rank: int, parts: BlockParts | None, name: str
) -> Callable[..., Any]:
    flow: dict[str, Any] = {}
    if parts is not None and name in parts.plan.gathered:
        flow = {"parts": parts, "dims": parts.plan.gathered[name], "to": parts.plan.scattered.get(name)}

    def forward(*args: Any, **kwargs: Any) -> Any:
        return attend_with_parts(module, group, ranks, rank, *args, **kwargs, **flow)

    return forward


def replace_forward(module: Any, forward: Callable[..., Any]) -> Undo:
    """Give one module another forward."""
    return _set(module, "forward", forward)


def _set(module: Any, name: str, value: Any) -> Undo:
    had, before = name in module.__dict__, module.__dict__.get(name)
    setattr(module, name, value)

    def undo() -> None:
        if had:
            setattr(module, name, before)
        else:
            delattr(module, name)

    return undo


def _wrap(block: Any, entered: _Entered, calls: _RewrittenCalls, parts: BlockParts | None) -> Undo:
    """Wrap the block's forward, inside what recomputes, compiles or offloads it."""
    outer = block.__dict__.get("forward")
    inner: list[Callable[..., Any]] | None = getattr(outer, "unipar_inner", None)
    recomputes: bool = getattr(outer, "unipar_recomputes", False)
    plain: Callable[..., Any] = block.forward if inner is None else inner[0]

    def forward(*args: Any, **kwargs: Any) -> Any:
        if arrived := kwargs.pop(_ARRIVED, ()):
            args, kwargs = wrap_parts(args, kwargs, arrived)
        calls.take_arguments(args, kwargs)
        with ExitStack() as stack:
            stack.callback(entered.clear)
            if parts is not None:
                stack.callback(parts.clear)
                args, kwargs = parts.enter(args, kwargs)
                calls.mode.span = parts.span
            stack.enter_context(calls.around_block())
            out = run_block(plain, args, kwargs)
        return out if parts is None else parts.leave(out)

    if parts is not None:
        parts.keep_wholes = recomputes
    if inner is None:
        return replace_forward(block, forward)
    inner[0] = forward
    replaced: Undo | None = None
    if recomputes and parts is not None:
        replaced = replace_forward(block, _recomputing_on_plain(cast("Callable[..., Any]", outer)))

    def undo() -> None:
        inner[0] = plain
        if replaced is not None:
            replaced()

    return undo


_ARRIVED: Final = "unipar_arrived"
"""Argument of a recomputed block: what is known of the parts among the others."""


def _recomputing_on_plain(recomputed: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward whose arguments torch keeps as plain tensors: hooks on what it keeps lose what they know."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        args, kwargs, arrived = unwrap_parts(args, kwargs)
        return recomputed(*args, **kwargs, **({_ARRIVED: arrived} if arrived else {}))

    return forward
