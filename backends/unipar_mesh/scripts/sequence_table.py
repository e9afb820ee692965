"""Plan of a script that splits hidden states along the sequence over the ranks of tensor: where it gathers them."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from unipar_mesh.scripts.block_check import (
    BlockRun,
    Mismatch,
    compare_runs,
    prepared_for_check,
    run_parts,
    run_whole,
)
from unipar_mesh.scripts.look_at_calls import BlockCall, ModelLook
from unipar_mesh.scripts.mesh_parts import ArgumentPlace, CutPlan
from unipar_mesh.scripts.tensor_table import line_of_error
from unipar_mesh.sequence.sequence_parts import hidden_place
from unipar_mesh.sequence.sequence_plan import add_sequence
from unipar_mesh.tensor.cuts import BlockPlan, SequencePlan
from unipar_mesh.tensor.metas import meta_arguments, meta_block
from unipar_mesh.tensor.sites import module_of_site

_LEAVE_OUT = "leave sequence out of the export (--set parallel.sequence=false)"


def hidden_of_blocks(look: ModelLook) -> tuple[ArgumentPlace, list[str]]:
    """Return the place or name of the hidden states among a block's arguments, and sentences on what is in the way."""
    places: set[ArgumentPlace] = set()
    for calls in look.calls:
        for args, kwargs in calls.values():
            named = [*enumerate(args), *kwargs.items()]
            place = hidden_place([value for _, value in named])
            places |= {named[place][0]} if place is not None and named[place][1].ndim == 3 else {"nothing"}
    reasons: list[str] = []
    if len(places) > 1 or "nothing" in places:
        reasons.append(
            "parallel.sequence: a script knows one way in which blocks are given their hidden states, a tensor of "
            f"three dimensions (here: {', '.join(sorted(map(str, places)))}): call all blocks alike, or {_LEAVE_OUT}"
        )
    if look.order != [*look.part.blocks] or look.passed or look.detours:
        irregular = [*look.passed, *look.detours]
        irregular += [name for name, due in zip(look.order, look.part.blocks, strict=False) if name != due]
        reasons.append(
            "parallel.sequence: hidden states must go straight from block to block, each called once, and "
            f"{(irregular or look.order[-1:])[0]} is given something else: change that between blocks, or {_LEAVE_OUT}"
        )
    return min(places, key=str), reasons


def plan_of_parts(
    name: str,
    block: nn.Module,
    call: BlockCall,
    derived: BlockPlan,
    plan: CutPlan | None,
    hidden: ArgumentPlace,
    dropping: Collection[str],
) -> tuple[CutPlan | None, list[str]]:
    """Return a script's plan of a block with what splits the sequence, or None and sentences on why a script cannot.

    Raise TaskError where no engine can. `plan`: how matrices are cut; `dropping`: lines at which dropout drops
    something.
    """
    if plan is None:
        return None, [
            f"parallel.sequence: {name} has no matrix that tensor cuts, and a script splits all blocks: {_LEAVE_OUT}"
        ]
    args, kwargs = meta_arguments(*call)
    planned = add_sequence(name, meta_block(block), args, kwargs, derived)
    sequence = planned.sequence
    if sequence is None or not _fits_a_script(sequence, plan):
        return None, [
            f"parallel.sequence: {name} has cut matrices that take or return something else than its hidden states "
            f"(batch, sequence, width), and a script carries those alone: keep them whole by the task's tensor(), or "
            f"{_LEAVE_OUT}"
        ]
    prepared = prepared_for_check(block)
    reference = run_whole(prepared, call)
    joined = [module_of_site(s) for s, rewrites in planned.sites.items() if any(r.kind == "join" for r in rewrites)]
    failures, mismatch = list[str](), ""
    for gathers, behind in _ways(prepared, call, plan):
        if any(not _covered(module, gathers) for module in joined):
            failures.append(f"{sequence.joined[0]} needs all positions")
            continue
        tried = replace(plan, gathers=gathers, behind=behind)
        runs = run_parts(prepared, call, tried, derived.ranks, hidden)
        if isinstance(runs, BaseException):
            failures.append(f"{(str(runs).splitlines() or [type(runs).__name__])[0]}{line_of_error(runs)}")
            continue
        partial_names = compare_runs(block, derived, reference, runs)
        if isinstance(partial_names, Mismatch):
            mismatch = f"{partial_names.what} is not that of the whole"
            continue
        masks, reasons = _masks(name, block, plan, reference, runs[0], dropping)
        return replace(tried, masks=masks, partial=tuple(partial_names)), reasons
    return None, [
        f"parallel.sequence: {name} does not run on parts of a sequence as a script splits it "
        f"({mismatch or failures[0]}): ask a cut matrix's output for sizes, or compute with the whole in a module of "
        f"its own, or {_LEAVE_OUT}"
    ]


def _fits_a_script(sequence: SequencePlan, plan: CutPlan) -> bool:
    gathered = set(sequence.gathered) == set(plan.columns) and set(sequence.gathered.values()) == {(-2,)}
    scattered = set(sequence.scattered) == set(plan.rows) and set(sequence.scattered.values()) == {-2}
    return gathered and scattered and sequence.dim == 1 and sequence.outputs == (0,)


def _covered(module: str, gathers: Mapping[str, Any]) -> bool:
    """Return whether a module lies in one that is given the whole."""
    return any(module == name or module.startswith(f"{name}.") for name in gathers)


def _ways(
    block: nn.Module, call: BlockCall, plan: CutPlan
) -> Iterator[tuple[dict[str, ArgumentPlace], tuple[str, ...]]]:
    """Yield modules before which and behind which to gather hidden states, the latest first.

    That is before cut matrices, before modules around them that take the same, or behind the one that puts it out.
    """
    taken, sources = _flow(block, call, plan)
    options: dict[tuple[str, ...], list[str]] = {}
    for column in plan.columns:
        around = tuple(sorted((m for m in taken if column.startswith(f"{m}.")), key=len, reverse=True))
        options.setdefault((*around, sources[column]), []).append(column)  # all that take it in the same place
    levels = [range(len(places) + bool(places[-1])) for places in options]
    for chosen in sorted(itertools.product(*levels), key=sum):
        gathers, behind = dict[str, ArgumentPlace](), list[str]()
        for ((*around, source), columns), level in zip(options.items(), chosen, strict=True):
            if level > len(around):
                behind.append(source)
            else:
                gathers |= {m: taken[m] for m in (around[level - 1 : level] or columns)}
        yield gathers, tuple(dict.fromkeys(behind))


def _flow(block: nn.Module, call: BlockCall, plan: CutPlan) -> tuple[dict[str, ArgumentPlace], dict[str, str]]:
    """Return where columns and the modules around them take hidden states, and which module puts out a column's."""
    taken: dict[str, ArgumentPlace] = dict.fromkeys(plan.columns, 0)
    inputs_of_block: dict[str, list[tuple[ArgumentPlace, Any]]] = {}
    inputs: dict[str, Tensor] = {}
    outputs: list[tuple[str, Any]] = []

    def before(module: nn.Module, args: Any, kwargs: Any, name: str) -> None:
        inputs_of_block[name] = [*enumerate(args), *kwargs.items()]
        if name in plan.columns:
            inputs[name] = args[0]

    def behind(module: nn.Module, args: Any, out: Any, name: str) -> None:
        outputs.append((name, out))

    copied = copy.deepcopy(block)
    for name, module in copied.named_modules():
        module.register_forward_pre_hook(partial(before, name=name), with_kwargs=True)
        module.register_forward_hook(partial(behind, name=name))
    with torch.no_grad():
        args, kwargs = tree_map(_doubled, call)
        copied(*args, **kwargs)
    for column, x in inputs.items():
        for name, arguments in inputs_of_block.items():
            if name and column.startswith(f"{name}."):
                places = [place for place, value in arguments if value is x]
                taken |= dict.fromkeys([name] if places else [], (*places, 0)[0])
    return taken, {column: next((n for n, out in outputs if out is x), "") for column, x in inputs.items()}


def _doubled(x: Any) -> Any:
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


def _masks(
    name: str, block: nn.Module, plan: CutPlan, reference: BlockRun, run: BlockRun, dropping: Collection[str]
) -> tuple[tuple[str, ...], list[str]]:
    """Return the dropout modules that are given parts, and sentences on those whose masks a script cannot cut."""
    modules, masked, reasons = dict(block.named_modules()), list[str](), list[str]()
    for key, shapes in run.dropped.items():
        if shapes <= reference.dropped.get(key, set()) or key in plan.dropouts:
            continue
        if key in modules:
            (shape, *others), wholes = [*shapes], [*reference.dropped[key]]
            alike = len(shape) == 3 and not others and [(s[0], s[2:]) for s in wholes] == [(shape[0], shape[2:])]
            if alike and key not in reference.strided:
                masked.append(key)
            else:
                reasons.append(
                    f"parallel.sequence: {name}.{key} drops elements of a tensor of shape {tuple(wholes[0])}, and a "
                    "script cuts masks of hidden states (batch, sequence, width), contiguous, in one place each: set "
                    f"its rate to 0, or {_LEAVE_OUT}"
                )
        elif key in dropping:
            reasons.append(
                f"parallel.sequence: {name} calls dropout at {key} on a part of the sequence, and a script cuts the "
                "masks of nn.Dropout modules only: use one there, or set its rate to 0"
            )
    return tuple(masked), reasons
