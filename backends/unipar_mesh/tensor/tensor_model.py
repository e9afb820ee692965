"""Tensor parallelism of a model: one plan for each distinct block, from one call of the task's loss on meta tensors."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map

from unipar.errors import TaskError
from unipar_mesh.look_at_model import kind_of_block
from unipar_mesh.refusal_sentences import kinds_in_block, refuse_unknown_patterns
from unipar_mesh.sequence.sequence_plan import add_sequence
from unipar_mesh.tensor.block_calls import CallKind, describe_difference_of_calls, kind_of_call
from unipar_mesh.tensor.cuts import BlockPlan, ParameterCut, Rewrite, cut_parameters
from unipar_mesh.tensor.metas import meta_arguments, meta_block
from unipar_mesh.tensor.tensor_plan import derive_block_plan, plan_other_call
from unipar_mesh.tensor.tensor_trial import CannotCut
from unipar_mesh.tensor.vocabulary import Vocabulary, cut_vocabulary


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
        sentences: list[str] = []
        for name in self.tried:
            plan = self.blocks[name]
            alike = sum(other is plan for other in self.blocks.values())
            columns = [n for n, cut in plan.cuts.items() if cut.kind == "column"]
            rows = [n for n, cut in plan.cuts.items() if cut.kind == "row"]
            cut = f"columns {', '.join(columns)}; rows {', '.join(rows)}" if plan.cuts else "nothing is cut"
            sentences.append(f"{name}{f' and {alike - 1} more' if alike > 1 else ''}: {cut}")
            sentences += _sequence_sentences(name, plan)
            sentences += [f"{name}: {module} stays whole: {reason}" for module, reason in plan.whole.items()]
        return sentences


def _sequence_sentences(name: str, plan: BlockPlan) -> list[str]:
    """Return what a block does with hidden states that are cut along the sequence; nothing if they are not."""
    if (split := plan.sequence) is None:
        return []
    sentences = [
        f"{name}: hidden states are split along their dimension {split.dim}: a rank keeps 1/{plan.ranks} of those of "
        f"norms, residuals and dropout, and between blocks; gathered for {', '.join(split.gathered)}, added up in "
        f"parts by {', '.join(split.scattered)}"
    ]
    if split.joined:
        sentences.append(f"{name}: gathered whole, because these calls need all positions: {', '.join(split.joined)}")
    if split.on_parts:
        sentences.append(f"{name}: used on parts, with gradients added up: {', '.join(split.on_parts)}")
    return sentences


class _Captured(BaseException):
    """End of a call whose blocks have all been seen; no program catches it by chance."""


def derive_model_plan(
    model: nn.Module,
    blocks: Sequence[str],
    loss: Callable[[nn.Module, Any], Any],
    batch: Any,
    ranks: int,
    wanted_kinds: Mapping[str, str] | None = None,
    left_whole: Callable[[nn.Module], Mapping[str, str]] | None = None,
    *,
    sequence: bool = False,
) -> ModelPlan:
    """Return how this many ranks can cut a model's blocks.

    `loss` is called on a copy of the model without values until every kind of block was called. `wanted_kinds`: kinds
    by pattern of names in the model, which win. `left_whole`: as in `plan_blocks`. `sequence`: hidden states are cut
    along the sequence as well.
    """
    began = time.process_time()
    copied = meta_block(model)
    first: dict[Any, str] = {}
    for name in blocks:
        first.setdefault(kind_of_block(copied.get_submodule(name)), name)
    calls = block_calls(copied, blocks, list(first.values()), loss, batch)
    missing = [name for name in first.values() if name not in calls]
    if missing:
        raise TaskError(f"parallel.tensor: the loss does not call {missing[0]}, one of the model's blocks")
    plans = plan_blocks(copied, blocks, calls, ranks, wanted_kinds or {}, left_whole, sequence=sequence)
    tried = {id(plan): name for name, plan in reversed(plans.items())}
    return ModelPlan(plans, tuple(name for name in plans if name in tried.values()), time.process_time() - began)


def plan_blocks(
    model: nn.Module,
    blocks: Sequence[str],
    calls: Mapping[str, tuple[tuple[Any, ...], Mapping[str, Any]]],
    ranks: DeviceMesh | int,
    wanted_kinds: Mapping[str, str],
    left_whole: Callable[[nn.Module], Mapping[str, str]] | None = None,
    *,
    sequence: bool = False,
) -> dict[str, BlockPlan]:
    """Return the plan of each block of a kind that was called; equal blocks with the same `wanted_kinds` share one.

    `calls`: arguments of one block of each kind, by its name. `left_whole`: returns matrices that a library cannot cut,
    each with the reason. `sequence`: hidden states are cut as well.
    """
    arguments = {kind_of_block(model.get_submodule(name)): call for name, call in calls.items()}
    plans: dict[str, BlockPlan] = {}
    for names, wanted in blocks_by_kind(model, blocks, wanted_kinds):
        block = model.get_submodule(names[0])
        if (call := arguments.get(kind_of_block(block))) is not None:
            reasons = {} if left_whole is None else left_whole(block)
            plan = derive_block_plan(block, *call, ranks, wanted | dict.fromkeys(reasons, "whole"))
            if sequence:
                plan = add_sequence(names[0], block, *call, plan)
            plans |= dict.fromkeys(names, replace(plan, whole={**plan.whole, **reasons}))
    return {name: plans[name] for name in blocks if name in plans}


def blocks_by_kind(
    model: nn.Module, blocks: Sequence[str], patterns: Mapping[str, str]
) -> list[tuple[list[str], dict[str, str]]]:
    """Return the names of equal blocks of which `patterns` says the same, and what it says of their matrices."""
    refuse_unknown_patterns(patterns, model, blocks)
    blocks_of_kind: dict[Any, tuple[list[str], dict[str, str]]] = {}
    for name in blocks:
        block = model.get_submodule(name)
        wanted = kinds_in_block(patterns, name, block)
        blocks_of_kind.setdefault((kind_of_block(block), *sorted(wanted.items())), ([], wanted))[0].append(name)
    return [*blocks_of_kind.values()]


@final
class CallsOfBlock:
    """Calls that are rewritten in blocks of one kind, by the way in which a block is called.

    A batch may lead another way through a block than the one on which it was planned: packed texts come with a mask,
    others without. Such a way is tried when it first comes, on each rank by itself. It is not for `context`, which has
    cut the arguments by then.
    """

    def __init__(self, name: str, block: nn.Module, plan: BlockPlan) -> None:
        """Take the name of the first of these blocks, and a whole one of them."""
        self._name, self._block, self._plan = name, meta_block(block), plan
        self._sites_of_call: dict[CallKind, Mapping[str, tuple[Rewrite, ...]]] = {plan.call: plan.sites}

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Mapping[str, tuple[Rewrite, ...]]:
        """Return the calls that are rewritten in a block that is called like this."""
        kind = kind_of_call(args, kwargs)
        known = self._sites_of_call.get(kind)
        if known is None:
            with torch.inference_mode(mode=False), torch.enable_grad(), torch.random.fork_rng(devices=[]):
                known = self._sites_of_call[kind] = self._tried(args, kwargs, kind)
        return known

    def _tried(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], kind: CallKind
    ) -> Mapping[str, tuple[Rewrite, ...]]:
        plan = self._plan
        try:
            other_plan = plan_other_call(self._block, args, kwargs, plan)
        except CannotCut as e:
            raise self._refusal(kind, e.reason) from e
        if (split := plan.sequence) is None:
            return other_plan.sites
        other_plan = add_sequence(self._name, self._block, args, kwargs, other_plan)
        if other_plan.sequence is None or replace(other_plan.sequence, joined=split.joined) != split:
            raise self._refusal(kind, "its hidden states would be split in another way")
        return other_plan.sites

    def _refusal(self, kind: CallKind, reason: str) -> TaskError:
        return TaskError(
            f"parallel.tensor: {self._plan.ranks} splits {self._name} as it was called on the first microbatch, and "
            f"now {describe_difference_of_calls(self._plan.call, kind)}: {reason}. Call it alike for every batch, keep "
            "these matrices whole in the task's tensor(model), or leave tensor out"
        )


def calls_of_blocks(model: nn.Module, plans: Mapping[str, BlockPlan]) -> dict[str, CallsOfBlock]:
    """Return what knows the calls to rewrite, by the name of the block; the blocks are whole when it is made."""
    made: dict[int, CallsOfBlock] = {}
    for name, plan in plans.items():
        if id(plan) not in made:
            made[id(plan)] = CallsOfBlock(name, model.get_submodule(name), plan)
    return {name: made[id(plan)] for name, plan in plans.items()}


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
            positional, named = meta_arguments(args, kwargs, gradients=False)
            return tree_map(_zeros_of_its_own, plain(*positional, **named))

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
