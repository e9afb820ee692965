"""Table of a script that splits hidden states along the sequence over the ranks of tensor: where it gathers them."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from unipar_mesh.scripts.look_at_calls import BlockCall, ModelLook
from unipar_mesh.scripts.parts_check import ALLOWED_IN_PARTS, prepared_for_check
from unipar_mesh.scripts.sequence_check import BlockRun, run_parts, run_whole
from unipar_mesh.scripts.tensor_table import BlockTable, line_of_error
from unipar_mesh.sequence.sequence_parts import hidden_place
from unipar_mesh.sequence.sequence_plan import add_sequence
from unipar_mesh.tensor.cuts import BlockPlan, Rewrite, SequencePlan, cut_parameters
from unipar_mesh.tensor.metas import meta_arguments, meta_block
from unipar_mesh.tensor.sites import module_of_site

_LEAVE_OUT = "leave sequence out of the export (--set parallel.sequence=false)"


@dataclass(frozen=True)
class PartsTable:
    """Literals of a script on the parts of one kind of block; names are those in the block."""

    gathers: Mapping[str, int | str] = field(default_factory=dict[str, Any])
    """Modules before which hidden states are made whole, with the place or name of the argument."""

    behind: tuple[str, ...] = ()
    """Modules behind which they are made whole."""

    masks: tuple[str, ...] = ()
    """Dropout modules that are given parts."""

    partial: tuple[str, ...] = ()
    """Parameters that act on parts: their gradients are added up over the ranks."""


def hidden_of_blocks(look: ModelLook) -> tuple[int | str, list[str]]:
    """Return the place or name of the hidden states among a block's arguments, and sentences on what is in the way."""
    found: set[int | str] = set()
    for calls in look.calls:
        for args, kwargs in calls.values():
            named = [*enumerate(args), *kwargs.items()]
            place = hidden_place([value for _, value in named])
            found |= {named[place][0]} if place is not None and named[place][1].ndim == 3 else {"nothing"}
    reasons: list[str] = []
    if len(found) > 1 or "nothing" in found:
        reasons.append(
            "parallel.sequence: a script knows one way in which blocks are given their hidden states, a tensor of "
            f"three dimensions (here: {', '.join(sorted(map(str, found)))}): call all blocks alike, or {_LEAVE_OUT}"
        )
    if look.order != look.part.blocks or look.passed or look.detours:
        odd = [*look.passed, *look.detours]
        odd += [name for name, due in zip(look.order, look.part.blocks, strict=False) if name != due]
        reasons.append(
            "parallel.sequence: hidden states must go straight from block to block, each called once, and "
            f"{(odd or look.order[-1:])[0]} is given something else: change that between blocks, or {_LEAVE_OUT}"
        )
    return min(found, key=str), reasons


def table_of_parts(
    name: str,
    block: nn.Module,
    call: BlockCall,
    plan: BlockPlan,
    table: BlockTable | None,
    hidden: int | str,
    dropping: Collection[str],
    *,
    tuples: bool,
) -> PartsTable | list[str]:
    """Return how a script splits what goes through a block, or sentences on why it cannot.

    Raise TaskError where no engine can. `dropping`: lines at which dropout drops something; `tuples`: whether the
    block returns a tuple.
    """
    if table is None:
        return [
            f"parallel.sequence: {name} has no matrix that tensor cuts, and a script splits all blocks: {_LEAVE_OUT}"
        ]
    args, kwargs = meta_arguments(*call)
    planned = add_sequence(name, meta_block(block), args, kwargs, plan)
    sequence = planned.sequence
    if sequence is None or not _fits_a_script(sequence, table):
        return [
            f"parallel.sequence: {name} has cut matrices that take or return something else than its hidden states "
            f"(batch, sequence, width), and a script carries those alone: keep them whole by the task's tensor(), or "
            f"{_LEAVE_OUT}"
        ]
    whole_block = prepared_for_check(block)
    whole = run_whole(whole_block, call, hidden)
    joined = [module_of_site(s) for s, rewrites in planned.sites.items() if any(r.kind == "join" for r in rewrites)]
    failures, mismatch = list[str](), ""
    for gathers, behind in _ways(whole_block, call, table, planned):
        if any(not _covered(module, gathers) for module in joined):
            failures.append(f"{sequence.joined[0]} needs all positions")
            continue
        cuts = {"columns": table.columns, "rows": table.rows, "numbers": table.numbers, "dropouts": table.dropouts}
        fields = {**cuts, "gathers": gathers, "behind": behind, "masks": (), "partial": ()}
        runs = run_parts(whole_block, call, hidden, fields, plan.ranks, tuples=tuples)
        if isinstance(runs, BaseException):
            failures.append(f"{(str(runs).splitlines() or [type(runs).__name__])[0]}{line_of_error(runs)}")
            continue
        partial_names = _partial_parameters(block, plan, whole, runs)
        if isinstance(partial_names, str):
            mismatch = f"{partial_names} is not that of the whole"
            continue
        masks, reasons = _masks(name, block, table, whole, runs[0], dropping)
        return reasons or PartsTable(gathers, behind, masks, partial_names)
    return [
        f"parallel.sequence: {name} does not run on parts of a sequence as a script splits it "
        f"({mismatch or failures[0]}): ask a cut matrix's output for sizes, or compute with the whole in a module of "
        f"its own, or {_LEAVE_OUT}"
    ]


def _fits_a_script(sequence: SequencePlan, table: BlockTable) -> bool:
    gathered = set(sequence.gathered) == set(table.columns) and set(sequence.gathered.values()) == {(-2,)}
    scattered = set(sequence.scattered) == set(table.rows) and set(sequence.scattered.values()) == {-2}
    return gathered and scattered and sequence.dim == 1 and sequence.outputs == (0,)


def _covered(module: str, gathers: Mapping[str, Any]) -> bool:
    """Return whether a module lies in one that is given the whole."""
    return any(module == name or module.startswith(f"{name}.") for name in gathers)


_Way = tuple[dict[str, int | str], tuple[str, ...]]
"""Modules before which hidden states are made whole, and modules behind which they are."""


def _ways(block: nn.Module, call: BlockCall, table: BlockTable, plan: BlockPlan) -> Iterator[_Way]:
    """Yield places at which to gather, the latest first: before the cut matrices, before modules around them, behind
    modules whose output they take."""
    taken, sources = _flow(block, call, table)
    asking = {module_of_site(site) for site, rewrites in plan.sites.items() if any(map(_needs_all, rewrites))}
    around = {column: [m for m in taken if column.startswith(f"{m}.")] for column in table.columns}
    start = {column: _earliest(column, asking, around[column]) for column in table.columns}
    yield {m: taken[m] for m in start.values()}, ()
    loose = [c for c in table.columns if start[c] == c and sources[c]]
    for chosen in ([c] for c in loose) if len(loose) > 1 else ():
        yield _with_sources(start, taken, sources, [c for c in loose if sources[c] == sources[chosen[0]]])
    if loose:
        yield _with_sources(start, taken, sources, loose)
    outermost = {c: min(around[c], key=len, default=c) for c in table.columns}
    yield {m: taken[m] for m in outermost.values()}, ()


def _needs_all(rewrite: Rewrite) -> bool:
    """Return whether a call on a part asks for sizes, positions or values of the whole sequence."""
    plain = rewrite.kind in ("part", "dropout") and all(dim is None for _, dim in rewrite.arguments)
    return rewrite.sequence and not plain


def _earliest(column: str, asking: Collection[str], around: Collection[str]) -> str:
    """Return the module before which a column's input is gathered, so that no module around it asks for a part's size.

    `around`: modules around the column that are given the same input.
    """
    outermost = min((a for a in asking if a and column.startswith(f"{a}.")), key=len, default=None)
    if outermost is None:
        return column
    return max((m for m in around if outermost == m or outermost.startswith(f"{m}.")), key=len, default=column)


def _with_sources(
    start: Mapping[str, str], taken: Mapping[str, int | str], sources: Mapping[str, str], columns: Collection[str]
) -> _Way:
    behind = tuple(dict.fromkeys(sources[c] for c in columns))
    return {m: taken[m] for c, m in start.items() if c not in columns}, behind


def _flow(block: nn.Module, call: BlockCall, table: BlockTable) -> tuple[dict[str, int | str], dict[str, str]]:
    """Return where columns and the modules around them take hidden states, and which module puts out a column's."""
    taken: dict[str, int | str] = dict.fromkeys(table.columns, 0)
    given: dict[str, list[tuple[int | str, Any]]] = {}
    inputs: dict[str, Tensor] = {}
    made: list[tuple[str, Any]] = []

    def before(module: nn.Module, args: Any, kwargs: Any, name: str) -> None:
        given[name] = [*enumerate(args), *kwargs.items()]
        if name in table.columns:
            inputs[name] = args[0]

    def behind(module: nn.Module, args: Any, out: Any, name: str) -> None:
        made.append((name, out))

    copied = copy.deepcopy(block)
    for name, module in copied.named_modules():
        module.register_forward_pre_hook(partial(before, name=name), with_kwargs=True)
        module.register_forward_hook(partial(behind, name=name))
    with torch.no_grad():
        args, kwargs = tree_map(_doubled, call)
        copied(*args, **kwargs)
    for column, x in inputs.items():
        for name, arguments in given.items():
            if name and column.startswith(f"{name}."):
                places = [place for place, value in arguments if value is x]
                taken |= dict.fromkeys([name] if places else [], (*places, 0)[0])
    return taken, {column: next((n for n, out in made if out is x), "") for column, x in inputs.items()}


def _doubled(x: Any) -> Any:
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


def _partial_parameters(
    block: nn.Module, plan: BlockPlan, whole: BlockRun, runs: list[BlockRun]
) -> tuple[str, ...] | str:
    """Return the parameters whose gradients are to be added up over the ranks, or what is not as in the whole block."""
    for run in runs:
        for what, ours, theirs in (("output", run.outputs, whole.outputs), ("input", run.inputs, whole.inputs)):
            for a, b in zip(ours, theirs, strict=True):
                if (a is None) != (b is None) or (a is not None and b is not None and _off(a, b) > ALLOWED_IN_PARTS):
                    return "the result" if what == "output" else "the gradient of what it is given"
    cuts = cut_parameters(block, plan)
    most = max(float(g.abs().max()) for g in whole.gradients.values())
    found: list[str] = []
    for name, expected in whole.gradients.items():
        gradients = [run.gradients[name] for run in runs]
        if name in cuts:
            worst = max(_off(g, cuts[name].local(expected, rank), most) for rank, g in enumerate(gradients))
        else:
            each = max(_off(g, expected, most) for g in gradients)
            added = _off(torch.stack(gradients).sum(0), expected, most)
            worst = min(each, added)
            found += [name] * (added < each)
        if worst > ALLOWED_IN_PARTS:
            return f"the gradient of {name}"
    return tuple(found)


def _off(a: Tensor, b: Tensor, most: float = 0.0) -> float:
    """Return by which share of its largest value a result is off; tiny ones are measured by a share of `most`."""
    if a.shape != b.shape:
        return float("inf")
    return float((a - b).abs().max()) / max(float(b.abs().max()), 1e-3 * most, 1e-30)


def _masks(
    name: str, block: nn.Module, table: BlockTable, whole: BlockRun, run: BlockRun, dropping: Collection[str]
) -> tuple[tuple[str, ...], list[str]]:
    """Return the dropout modules that are given parts, and sentences on those whose masks a script cannot cut."""
    modules, found, reasons = dict(block.named_modules()), list[str](), list[str]()
    for key, shapes in run.dropped.items():
        if shapes <= whole.dropped.get(key, set()) or key in table.dropouts:
            continue
        if key in modules:
            (shape, *others), wholes = [*shapes], [*whole.dropped[key]]
            alike = len(shape) == 3 and not others and [(s[0], s[2:]) for s in wholes] == [(shape[0], shape[2:])]
            if alike and key not in whole.strided:
                found.append(key)
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
    return tuple(found), reasons
