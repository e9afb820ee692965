"""Plan of a block whose hidden states are cut along the sequence, found by a second trial on meta tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.utils._pytree import tree_flatten, tree_flatten_with_path, tree_leaves, tree_unflatten

from unipar.errors import TaskError
from unipar_mesh.sequence.sequence_collectives import Span
from unipar_mesh.sequence.sequence_parts import CutSequence, dim_of_sequence, hidden_place
from unipar_mesh.tensor.cut_tensors import cut_like, cut_sequence, mark_sources, place_of
from unipar_mesh.tensor.cuts import BlockPlan, Rewrite, SequencePlan, is_linear
from unipar_mesh.tensor.metas import meta_arguments, meta_block
from unipar_mesh.tensor.sites import run_block
from unipar_mesh.tensor.tensor_plan import Expected, rehearse
from unipar_mesh.tensor.tensor_trial import CannotCut, Trial

_unseen: Any = torch._C.DisableTorchFunction  # pyright: ignore[reportPrivateUsage]
_HIDDEN = "hidden states"
"""Source of what is cut, in the trial's records."""


def add_sequence(name: str, block: nn.Module, args: Any, kwargs: Any, plan: BlockPlan) -> BlockPlan:
    """Return a block's plan with its hidden states cut along the sequence between the cut matrices.

    A block without cut matrices stays as it is. Raise TaskError where a call needs the sequence whole.
    """
    if not plan.cuts:
        return plan
    try:
        return _with_sequence(block, args, kwargs, plan)
    except CannotCut as e:
        raise TaskError(
            f"parallel.sequence: true splits what goes through {name} along its dimension "
            f"{_dim_of_hidden(args, kwargs)}, and {e.reason}: leave sequence out (parallel.sequence: false)"
        ) from e


def _with_sequence(block: nn.Module, args: Any, kwargs: Any, plan: BlockPlan) -> BlockPlan:
    """Return a plan that holds in training and evaluation, on the first rank and the last; else raise CannotCut."""
    trials = [_SequenceTrial(block, args, kwargs, plan, training=training) for training in (True, False)]
    sites: dict[str, tuple[Rewrite, ...]] = dict(plan.sites)
    for key in dict.fromkeys(key for trial in trials for key in trial.sites):
        if key in plan.sites:
            module, call, *_ = key.split("|")
            raise CannotCut(f"{call} in {module or 'it'} also takes parts of heads or channels")
        sites[key] = tuple(dict.fromkeys(r for trial in trials for r in trial.sites.get(key, ())))
    first, second = (trial.plan for trial in trials)
    if first != replace(second, joined=first.joined):
        raise CannotCut("training and evaluation use the sequence in different ways")
    sequence_plan = replace(plan, sites=sites, sequence=first)
    for trial, training in zip(trials, (True, False), strict=True):
        for rank in (0, plan.ranks - 1):
            expected = trial.expected(shapes=rank == 0)
            call = meta_arguments(args, kwargs)
            out = rehearse(block, sequence_plan, call, expected, training=training, rank=rank)
            _check_results(first, tree_leaves(out), trial.span(rank))
    return sequence_plan


def _dim_of_hidden(args: Any, kwargs: Any) -> int:
    leaves = tree_leaves((args, kwargs))
    place = hidden_place(leaves)
    return 0 if place is None else dim_of_sequence(leaves[place].ndim)


def _check_results(plan: SequencePlan, results: list[Any], span: Span) -> None:
    """Raise CannotCut if a block's run on a part does not give the part."""
    for place, x in enumerate(results):
        if (place in plan.outputs) != isinstance(x, CutSequence):
            raise CannotCut("what it returns is a part on some ranks only")
        if isinstance(x, CutSequence) and x.part.shape[plan.dim] != span.count:
            has = x.part.shape[plan.dim]
            raise CannotCut(f"it returns {has} of {span.length} positions on a rank with {span.count}")


@final
class _SequenceTrial:
    """Run of a block with whole matrices, in which hidden states are cut, and gathered where cut matrices take them."""

    def __init__(self, block: nn.Module, args: Any, kwargs: Any, plan: BlockPlan, *, training: bool) -> None:
        copied = meta_block(block)
        plain = {name: module.forward for name, module in copied.named_modules()}
        self._ranks = plan.ranks
        self._gathered: dict[str, tuple[int | None, ...]] = {}
        self._scattered: dict[str, int] = {}
        self._on_parts: list[str] = []
        self._joined: list[str] = []
        args, kwargs = meta_arguments(args, kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        place = hidden_place(leaves)
        if place is None:
            raise CannotCut("it is given no hidden states")
        hidden: Tensor = leaves[place]
        self._dim = dim_of_sequence(hidden.ndim)
        self._along = self._dim
        self._length = hidden.shape[self._dim]
        self._trial = Trial(copied, plan.ranks, {}, training=training)
        self._trial.length = self._length
        self._trial.instead = self._joined_call
        cut = cut_sequence(hidden, self._trial.mesh, self._dim)
        mark_sources(cut, (_HIDDEN,))
        args, kwargs = tree_unflatten([cut if x is hidden else x for x in leaves], spec)
        self._take_over(copied, plain, plan)
        sent: Any = self._trial.sent
        with implicit_replication(), sent, self._trial:
            out = run_block(copied.forward, args, kwargs)
        results = tree_leaves(out)
        outputs = tuple(i for i, x in enumerate(results) if isinstance(x, DTensor))
        if any(place_of(results[i])[0] != self._dim for i in outputs):
            raise CannotCut("it returns them with the dimension at another place")
        self.plan = SequencePlan(
            self._dim,
            self._gathered,
            self._scattered,
            tuple(dict.fromkeys(self._on_parts)),
            outputs,
            tuple(dict.fromkeys(self._joined)),
        )
        self.sites = {
            key: tuple(replace(r, sequence=True) for r in rewrites) for key, rewrites in self._trial.sites.items()
        }

    def span(self, rank: int) -> Span:
        """Return a rank's part of the sequence."""
        return Span(self._length, self._ranks, rank, None)

    def expected(self, *, shapes: bool) -> Expected:
        """Return the shapes of what is cut, those of the first rank, for a rehearsal."""
        trial = self._trial
        blamed_shapes = {key: trial.shapes[key] for key in trial.blame if key in trial.shapes} if shapes else {}
        return Expected(blamed_shapes, trial.blame, trial.lines)

    def _take_over(self, copied: nn.Module, plain: Mapping[str, Callable[..., Any]], plan: BlockPlan) -> None:
        """Replace the forwards of matrices by those in which the sequence is gathered, and parts are made again."""
        own = [n for n, m in copied.named_modules() if isinstance(m, nn.MultiheadAttention)]
        for name, module in copied.named_modules():
            inside = name.rpartition(".")[0] in own
            target: Any = module
            if name in own:
                cut = name in plan.cuts
                target.forward = self._attention(name, plain[name]) if cut else plain[name]
            elif name in plan.cuts and not inside:
                way = self._column if plan.cuts[name].kind == "column" else self._row
                target.forward = way(name, plain[name])
            elif is_linear(module) and not inside:
                target.forward = self._uncut_linear(name, plain[name])

    def _whole_of(self, name: str, arguments: tuple[Any, ...]) -> list[Any]:
        """Return the inputs of a cut module, those that are cut made whole; note along which dimensions."""
        dims = tuple(place_of(x)[0] - x.ndim if isinstance(x, DTensor) else None for x in arguments)
        if self._gathered.setdefault(name, dims) != dims:
            raise CannotCut(f"{name} takes what is cut so, and what is not")
        full = list[Any]()
        for x in arguments:
            if isinstance(x, DTensor):
                self._along = place_of(x)[0]
                full.append(self._gathered_whole(x))
            else:
                full.append(x)
        return full

    def _part_of(self, name: str, out: Tensor) -> Tensor:
        """Return a cut module's sum as a part; where it has no such dimension, as it is."""
        along = self._along
        if along >= out.ndim - 1 or out.shape[along] != self._length:
            return out
        if self._scattered.setdefault(name, along - out.ndim) != along - out.ndim:
            raise CannotCut(f"{name} gives it in different dimensions")
        cut = cut_like(out.narrow(along, 0, self.span(0).count).contiguous(), self._trial.mesh, along, out.shape)
        mark_sources(cut, (_HIDDEN,))
        return cut

    def _column(self, name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def forward(x: Tensor) -> Tensor:
            with _unseen():
                return plain(*self._whole_of(name, (x,)))

        return forward

    def _row(self, name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def forward(x: Tensor) -> Tensor:
            if isinstance(x, DTensor):
                raise CannotCut(f"{name} takes what is cut so together with what is cut in channels")
            with _unseen():
                return self._part_of(name, plain(x))

        return forward

    def _uncut_linear(self, name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def forward(x: Tensor) -> Tensor:
            if not isinstance(x, DTensor):
                return plain(x)
            dim = place_of(x)[0]
            if dim == x.ndim - 1:
                raise CannotCut(f"{name} needs it whole")
            self._on_parts.append(name)
            with _unseen():
                out = plain(x.to_local())
                cut = cut_like(out, self._trial.mesh, dim, (*x.shape[:-1], out.shape[-1]))
            mark_sources(cut, (_HIDDEN,))
            return cut

        return forward

    def _attention(self, name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def forward(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
            with _unseen():
                out, weights = plain(*self._whole_of(name, (query, key, value)), *args, **kwargs)
                return self._part_of(name, out), weights

        return forward

    def _joined_call(self, func: Any, args: Any, kwargs: Any, key: str) -> Any:
        """Make a call that needs all positions on the whole of what is cut."""
        trial, arguments = self._trial, list[tuple[tuple[str | int, ...], int | None]]()
        if func.__name__.endswith("_") and not func.__name__.endswith("__"):
            raise CannotCut(f"{trial.lines[key]} needs it whole and changes it in place")

        def gathered(path: Any, x: Any) -> Any:
            if not isinstance(x, DTensor):
                return x
            arguments.append((tuple(getattr(k, "idx", getattr(k, "key", 0)) for k in path), place_of(x)[0] - x.ndim))
            return self._gathered_whole(x)

        leaves, spec = tree_flatten_with_path(args)
        args = tree_unflatten([gathered(path, x) for path, x in leaves], spec)
        leaves, spec = tree_flatten_with_path(kwargs)
        kwargs = tree_unflatten([gathered(path, x) for path, x in leaves], spec)
        trial.note_site(key, Rewrite("join", arguments=tuple(arguments)))
        self._joined.append(trial.lines[key])
        return func(*args, **kwargs)

    def _gathered_whole(self, x: DTensor) -> Tensor:
        local = x.to_local()
        return local.new_empty(x.shape) + 0 * local.sum()
