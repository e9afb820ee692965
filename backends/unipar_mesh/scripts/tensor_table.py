"""Tables of a script that cuts blocks: matrices, and numbers of heads or widths that a part of a block has fewer of."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from unipar_mesh.scripts.look_at_calls import BlockCall
from unipar_mesh.scripts.parts_check import compare_parts
from unipar_mesh.tensor.cuts import BlockPlan, Cut, is_transposed
from unipar_mesh.tensor.metas import meta_arguments, meta_block
from unipar_mesh.tensor.sites import module_of_site
from unipar_mesh.tensor.tensor_plan import Derivation
from unipar_mesh.tensor.tensor_trial import CannotCut, Trial


@dataclass(frozen=True)
class BlockTable:
    """Cuts of one kind of block as literals of a script; names are those in the block."""

    columns: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    """Linear layers whose outputs are cut, with the sizes of groups that are cut each by itself."""

    rows: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    """Linear layers whose inputs are cut, with the sizes of groups."""

    numbers: tuple[str, ...] = ()
    """Attributes of modules that are divided by the number of ranks."""

    dropouts: Mapping[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    """Dropout modules that are given a part: its dimension, counted from the right, and its number of groups."""

    attention_dropout: bool = False
    """True if attention has dropout of its own."""


def table_of_block(
    name: str, block: nn.Module, call: BlockCall, ranks: int, given: Mapping[str, str], dropping: Collection[str]
) -> tuple[BlockPlan, BlockTable | None, list[str]]:
    """Return the plan of a block, the same as a table, and sentences on what keeps a script from it.

    `dropping`: lines at which dropout drops something. There is no table if nothing is cut or if there are such
    sentences. `block` has values, and so have the arguments.
    """
    args, kwargs = meta_arguments(*call)
    derivation = Derivation(meta_block(block), args, kwargs, ranks, given)
    plan = derivation.plan()
    if not plan.cuts:
        return plan, None, []
    reasons, dropouts = [*_refused_modules(name, block, plan)], dict[str, tuple[int, int]]()
    attention_dropout = False
    for trial in derivation.last:
        for site, rewrites in trial.sites.items():
            for rewrite in rewrites:
                module = module_of_site(site)
                if rewrite.kind == "part":
                    reasons.append(
                        f"parallel.tensor: {name} uses a whole tensor with one that is cut ({trial.lines[site]}), so "
                        "that a rank needs its part of it: " + _whole_words(name, plan, trial, site)
                    )
                elif rewrite.kind == "dropout attention":
                    attention_dropout = True
                elif rewrite.kind == "dropout" and trial.lines[site].rpartition(" at ")[2] in dropping:
                    owner = block.get_submodule(module) if module != "?" else None
                    if isinstance(owner, nn.Dropout):
                        dropouts[module] = rewrite.dim, rewrite.groups
                    else:
                        reasons.append(
                            f"parallel.tensor: {name} calls {trial.lines[site]} on what is cut, and a script cuts the "
                            "masks of nn.Dropout modules only: use one there, or set its rate to 0"
                        )
    if reasons:
        return plan, None, [*dict.fromkeys(reasons)]
    try:
        numbers = _find_numbers(derivation, plan)
    except CannotCut as e:
        return plan, None, [_numbers_sentence(name, block, ranks, e)]
    table = BlockTable(
        columns={n: _groups(block, n, cut, 0) for n, cut in plan.cuts.items() if cut.kind == "column"},
        rows={n: _groups(block, n, cut, 1) for n, cut in plan.cuts.items() if cut.kind == "row"},
        numbers=numbers,
        dropouts=dropouts,
        attention_dropout=attention_dropout,
    )
    off = compare_parts(block, call, plan, partial(divide_numbers, numbers=numbers, ranks=ranks), dropouts)
    if off is not None:
        shown = f" with {', '.join(numbers)} divided by {ranks}" if numbers else ""
        return plan, None, [
            f"parallel.tensor: {name} in parts{shown} puts out something else than the whole ({off}), so a script "
            f"cannot cut it: {_WAY_OUT}"
        ]  # fmt: skip
    return plan, table, []


_WAY_OUT = "keep its matrices whole by the task's tensor(), or leave tensor out of the export"


def _refused_modules(name: str, block: nn.Module, plan: BlockPlan) -> Iterator[str]:
    for inner in plan.cuts:
        if isinstance(block.get_submodule(inner), nn.MultiheadAttention):
            yield (
                f"parallel.tensor: {name}.{inner} is a torch.nn.MultiheadAttention, whose forward is written for all "
                f"heads: keep it whole (tensor() of the task returns {{'*.{inner}': 'whole'}}), or leave tensor out of "
                "the export"
            )


def _whole_words(name: str, plan: BlockPlan, trial: Trial, site: str) -> str:
    sources = [n for n in trial.blame.get(site, ()) if n in plan.cuts] or [*plan.cuts]
    return f"keep {name}.{sources[0]} whole by the task's tensor(), or leave tensor out of the export"


def _numbers_sentence(name: str, block: nn.Module, ranks: int, e: CannotCut) -> str:
    known = [n for n, _ in _candidates(block, ranks)]
    tried = f"dividing {', '.join(known)} by {ranks} does not help" if known else f"none that {ranks} divides is known"
    return (
        f"parallel.tensor: {name} asks for sizes of the whole ({e.reason}{line_of_error(e.__cause__)}), and of the "
        f"whole numbers that its modules keep as attributes, {tried}: read them from such attributes (self.heads), or "
        f"{_WAY_OUT}"
    )


def line_of_error(e: BaseException | None) -> str:
    """Return the line of the user's code at which a call on parts has failed, behind a comma; "" if there is none."""
    frames = traceback.extract_tb(e.__traceback__) if e is not None else []
    own = [f for f in frames if not f.filename.startswith((_TORCH, _OWN, "<"))]
    return f", {os.path.basename(own[-1].filename)}:{own[-1].lineno}" if own else ""


_TORCH, _OWN = os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(os.path.dirname(__file__)))


def _groups(block: nn.Module, name: str, cut: Cut, dim: int) -> tuple[int, ...]:
    module: Any = block.get_submodule(name)
    width = module.weight.shape[1 - dim if is_transposed(module) else dim]
    return cut.sizes or (width // cut.groups,) * cut.groups


def _candidates(block: nn.Module, ranks: int) -> list[tuple[str, int]]:
    """Return the whole numbers that the modules of a block keep, which so many ranks divide."""
    return [
        (f"{name}.{attribute}" if name else attribute, value)
        for name, module in block.named_modules()
        if not type(module).__module__.startswith("torch.nn.") and not is_transposed(module)
        for attribute, value in vars(module).items()
        if type(value) is int and value > 1 and value % ranks == 0 and not attribute.startswith("_")
    ]


def divide_numbers(block: nn.Module, numbers: tuple[str, ...], ranks: int) -> None:
    """Divide attributes of a block's modules by the number of ranks."""
    for number in numbers:
        owner, _, attribute = number.rpartition(".")
        module = block.get_submodule(owner)
        setattr(module, attribute, getattr(module, attribute) // ranks)


def _find_numbers(derivation: Derivation, plan: BlockPlan) -> tuple[str, ...]:
    """Return attributes that make the block run on its parts once they are divided; raise CannotCut if none do.

    Greedy: the one with which a rehearsal comes furthest is kept, until it comes to its end.
    """
    bare = BlockPlan(plan.cuts, {}, 0, plan.ranks)
    names = [name for name, _ in _candidates(derivation.block, plan.ranks)]

    def progress(numbers: tuple[str, ...]) -> CannotCut | None:
        change: Callable[[nn.Module], None] = partial(divide_numbers, numbers=numbers, ranks=plan.ranks)
        for trial in derivation.last:
            try:
                derivation.rehearse(bare, trial, change)
            except CannotCut as e:
                return e
        return None

    chosen: tuple[str, ...] = ()
    failed = progress(chosen)
    while failed is not None:
        tried = {name: progress((*chosen, name)) for name in names if name not in chosen}
        best = max(tried, key=lambda n: float("inf") if (e := tried[n]) is None else e.calls, default=None)
        if best is None or ((e := tried[best]) is not None and e.calls <= failed.calls):
            raise failed
        chosen, failed = (*chosen, best), tried[best]
    return chosen
