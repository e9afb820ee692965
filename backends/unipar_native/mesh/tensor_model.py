"""Tensor parallelism of a model: one plan for each distinct block, from one call of the task's loss on meta tensors."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from unipar.errors import TaskError
from unipar_native.mesh.tensor.cuts import BlockPlan, ParameterCut, cut_parameters
from unipar_native.mesh.tensor.metas import meta_arguments, meta_block
from unipar_native.mesh.tensor.vocabulary import Vocabulary, cut_vocabulary
from unipar_native.mesh.tensor_plan import derive_block_plan


@dataclass(frozen=True)
class ModelPlan:
    """Plans of a model's blocks."""

    blocks: Mapping[str, BlockPlan]
    """Plan of each block, by its name in the model; equal blocks share one."""

    tried: tuple[str, ...]
    """Blocks that were tried: the first of each kind."""

    seconds: float
    """CPU seconds that this took."""

    def sentences(self) -> list[str]:
        """Return what is cut and what stays whole, one sentence for each kind of block."""
        said: list[str] = []
        for name in self.tried:
            plan = self.blocks[name]
            alike = sum(other is plan for other in self.blocks.values())
            columns = [n for n, cut in plan.cuts.items() if cut.kind == "column"]
            rows = [n for n, cut in plan.cuts.items() if cut.kind == "row"]
            cut = f"columns {', '.join(columns)}; rows {', '.join(rows)}" if plan.cuts else "nothing is cut"
            said.append(f"{name}{f' and {alike - 1} more' if alike > 1 else ''}: {cut}")
            said += [f"{name}: {module} stays whole: {reason}" for module, reason in plan.whole.items()]
        return said


class _Captured(BaseException):
    """End of a call whose blocks have all been seen; no program catches it by chance."""


def derive_model_plan(
    model: nn.Module,
    blocks: Sequence[str],
    loss: Callable[[nn.Module, Any], Any],
    batch: Any,
    ranks: int,
    given: Mapping[str, str] | None = None,
) -> ModelPlan:
    """Return how so many ranks can cut a model's blocks.

    `loss` is called on a copy of the model without values until every kind of block was called. `given`: kinds by
    pattern of names in the model, which win.
    """
    began = time.process_time()
    copied = meta_block(model)
    kinds = {name: _kind(copied.get_submodule(name)) for name in blocks}
    first: dict[Any, str] = {}
    for name, kind in kinds.items():
        first.setdefault(kind, name)
    calls = block_calls(copied, blocks, list(first.values()), loss, batch)
    plans = {
        kind: derive_block_plan(copied.get_submodule(name), *calls[name], ranks, _given_in(name, given or {}))
        for kind, name in first.items()
        if name in calls
    }
    missing = [name for name in first.values() if name not in calls]
    if missing:
        raise TaskError(f"parallel.tensor: the loss does not call {missing[0]}, one of the model's blocks")
    found = {name: plans[kind] for name, kind in kinds.items()}
    return ModelPlan(found, tuple(first.values()), time.process_time() - began)


def block_calls(
    model: nn.Module,
    blocks: Sequence[str],
    wanted: Sequence[str],
    loss: Callable[[nn.Module, Any], Any],
    batch: Any,
) -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    """Return the arguments with which a loss first calls the wanted ones of a model's blocks; it runs no further.

    The model is on meta. What lies outside its blocks gets zeros that take no memory, so that a program can look at
    masks and positions; blocks run without values.
    """
    calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}
    own = [model.get_submodule(name) for name in blocks]
    inside = {id(t) for block in own for t in (*block.parameters(), *block.buffers())}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for key, t in tensors.items():
                if t is not None and id(t) not in inside:
                    tensors[key] = _zeros(t)

    def instead(name: str, module: Any) -> Callable[..., Any]:
        plain = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            calls.setdefault(name, (args, kwargs))
            if set(calls) >= set(wanted):
                raise _Captured
            given, named = meta_arguments(args, kwargs, gradients=False)
            return tree_map(_zeros_of_its_own, plain(*given, **named))

        return forward

    for name in blocks:
        module: Any = model.get_submodule(name)
        module.forward = instead(name, module)
    arguments = tree_map(_zeros, batch)
    try:
        loss(model, arguments)
    except _Captured:
        pass
    finally:
        for name in blocks:
            del model.get_submodule(name).__dict__["forward"]
    return calls


def _zeros(x: Any) -> Any:
    """Return zeros of this shape, in the memory of one, for a tensor on meta; all else as it is."""
    if not isinstance(x, Tensor) or not x.is_meta:
        return x
    made = torch.zeros((), dtype=x.dtype).expand(x.shape)
    return nn.Parameter(made, x.requires_grad) if isinstance(x, nn.Parameter) else made.requires_grad_(x.requires_grad)


def _zeros_of_its_own(x: Any) -> Any:
    return _zeros(x).contiguous() if isinstance(x, Tensor) else x


def _kind(block: nn.Module) -> Any:
    """Return what blocks of one kind have in common: classes, shapes, and settings that are words or switches."""
    parts = tuple(
        (
            name,
            type(m),
            tuple(sorted((k, v) for k, v in vars(m).items() if isinstance(v, str | bool) and k != "training")),
        )
        for name, m in block.named_modules()
    )
    return parts, tuple((n, tuple(p.shape), p.dtype, p.requires_grad) for n, p in block.named_parameters())


def _given_in(block: str, given: Mapping[str, str]) -> dict[str, str]:
    """Return the patterns for names in a block."""
    return {_inside(block, pattern): kind for pattern, kind in given.items()}


def _inside(block: str, pattern: str) -> str:
    for at in range(len(pattern) + 1):  # the shortest head of the pattern that fits the block's name
        head, rest = pattern[:at], pattern[at:]
        if rest.startswith(".") and fnmatchcase(block, head):
            return rest[1:]
    return pattern


def cuts_of_model(
    model: nn.Module, plans: Mapping[str, BlockPlan], vocabulary: Vocabulary | None, ranks: int
) -> dict[str, ParameterCut]:
    """Return how each parameter is cut, by its name in the model; whole ones are left out."""
    cuts = {
        f"{block}.{name}": cut
        for block, plan in plans.items()
        for name, cut in cut_parameters(model.get_submodule(block), plan).items()
    }
    if vocabulary is not None:
        cuts |= cut_vocabulary(model, vocabulary, ranks)
    return {name: cuts[name] for name, _ in model.named_parameters() if name in cuts}
