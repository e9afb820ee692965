"""Plans of a script that cuts blocks: matrices, and numbers of heads or widths that a part of a block has fewer of."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from unipar_mesh.scripts.block_check import Mismatch, compare_runs, prepared_for_check, run_parts, run_whole
from unipar_mesh.scripts.look_at_calls import BlockCall
from unipar_mesh.scripts.mesh_parts import CutPlan
from unipar_mesh.tensor.cuts import BlockPlan, Cut, is_transposed
from unipar_mesh.tensor.metas import meta_arguments, meta_block
from unipar_mesh.tensor.sites import PACKAGE, module_of_site
from unipar_mesh.tensor.tensor_plan import Derivation
from unipar_mesh.tensor.tensor_trial import CannotCut, Trial


def plan_for_script(
    name: str, block: nn.Module, call: BlockCall, ranks: int, wanted: Mapping[str, str], dropping: Collection[str]
) -> tuple[BlockPlan, CutPlan | None, list[str]]:
    """Return the engine's plan of a block, that of a script, and sentences on what keeps a script from it.

    `dropping`: lines at which dropout drops something. A script has no plan if nothing is cut or if there are such
    sentences. `block` has values, and so have the arguments.
    """
    args, kwargs = meta_arguments(*call)
    derivation = Derivation(meta_block(block), args, kwargs, ranks, wanted)
    derived = derivation.plan()
    if not derived.cuts:
        return derived, None, []
    reasons, dropouts = [*_refused_modules(name, block, derived)], dict[str, tuple[int, int]]()
    attention = False
    for trial in derivation.last:
        for site, rewrites in trial.sites.items():
            for rewrite in rewrites:
                module = module_of_site(site)
                if rewrite.kind == "part":
                    reasons.append(
                        f"parallel.tensor: {name} uses a whole tensor with one that is cut ({trial.lines[site]}), so "
                        "that a rank needs its part of it: " + _whole_words(name, derived, trial, site)
                    )
                elif rewrite.kind == "dropout attention":
                    attention = True
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
        return derived, None, [*dict.fromkeys(reasons)]
    try:
        numbers = _find_numbers(derivation, derived)
    except CannotCut as e:
        return derived, None, [_numbers_sentence(name, block, ranks, e)]
    plan = CutPlan(
        columns={n: _groups(block, n, cut, 0) for n, cut in derived.cuts.items() if cut.kind == "column"},
        rows={n: _groups(block, n, cut, 1) for n, cut in derived.cuts.items() if cut.kind == "row"},
        numbers=numbers,
        dropouts=dropouts,
        attention=attention,
    )
    if (off := _difference(block, call, derived, plan)) is not None:
        shown = f" with {', '.join(numbers)} divided by {ranks}" if numbers else ""
        return derived, None, [
            f"parallel.tensor: {name} in parts{shown} puts out something else than the whole ({off}), so a script "
            f"cannot cut it: {_WAY_OUT}"
        ]  # fmt: skip
    return derived, plan, []


def _difference(block: nn.Module, call: BlockCall, derived: BlockPlan, plan: CutPlan) -> str | None:
    """Return what a block's parts compute otherwise than the whole, or None if they agree."""
    prepared = prepared_for_check(block)
    reference, runs = run_whole(prepared, call), run_parts(prepared, call, plan, derived.ranks)
    if isinstance(runs, BaseException):
        return f"{type(runs).__name__}: {(str(runs).splitlines() or [''])[0]}"
    for name in plan.dropouts:
        if name in reference.strided:
            return f"{name} is given a tensor that is not contiguous, whose mask would be drawn in another order"
    difference = compare_runs(block, derived, reference, runs)
    if isinstance(difference, Mismatch):
        return difference.off
    return f"{difference[0]} is used on parts" if difference else None


_WAY_OUT = "keep its matrices whole by the task's tensor(), or leave tensor out of the export"


def _refused_modules(name: str, block: nn.Module, derived: BlockPlan) -> Iterator[str]:
    for inner in derived.cuts:
        if isinstance(block.get_submodule(inner), nn.MultiheadAttention):
            yield (
                f"parallel.tensor: {name}.{inner} is a torch.nn.MultiheadAttention, whose forward is written for all "
                f"heads: keep it whole (tensor() of the task returns {{'*.{inner}': 'whole'}}), or leave tensor out of "
                "the export"
            )


def _whole_words(name: str, derived: BlockPlan, trial: Trial, site: str) -> str:
    sources = [n for n in trial.blame.get(site, ()) if n in derived.cuts] or [*derived.cuts]
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
    own = [f for f in frames if not f.filename.startswith((_TORCH, PACKAGE, "<"))]
    return f", {os.path.basename(own[-1].filename)}:{own[-1].lineno}" if own else ""


_TORCH = os.path.dirname(torch.__file__)


def _groups(block: nn.Module, name: str, cut: Cut, dim: int) -> tuple[int, ...]:
    module: Any = block.get_submodule(name)
    width = module.weight.shape[1 - dim if is_transposed(module) else dim]
    return cut.sizes or (width // cut.groups,) * cut.groups


def _candidates(block: nn.Module, ranks: int) -> list[tuple[str, int]]:
    """Return the whole numbers that the modules of a block keep, which this many ranks divide."""
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


def _find_numbers(derivation: Derivation, derived: BlockPlan) -> tuple[str, ...]:
    """Return attributes that make the block run on its parts once they are divided; raise CannotCut if none do.

    Greedy: the one with which a rehearsal comes furthest is kept, until it comes to its end.
    """
    bare = BlockPlan(derived.cuts, {}, 0, derived.ranks)
    names = [name for name, _ in _candidates(derivation.block, derived.ranks)]

    def progress(numbers: tuple[str, ...]) -> CannotCut | None:
        change: Callable[[nn.Module], None] = partial(divide_numbers, numbers=numbers, ranks=derived.ranks)
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
