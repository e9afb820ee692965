"""Check of a block whose hidden states a script splits along the sequence: the script's own classes, run in threads."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from typing_extensions import override

from unipar.backend.export import read_template, render_template
from unipar_mesh.scripts.look_at_calls import BlockCall
from unipar_mesh.scripts.parts_check import ThreadExchange, run_in_threads
from unipar_mesh.tensor.sites import BLOCK, frames_to, innermost_module, line_of


@dataclass
class BlockRun:
    """Results of a block's forward and backward, on one rank or whole."""

    outputs: list[Tensor] = field(default_factory=list[Tensor])
    inputs: list[Tensor | None] = field(default_factory=list[Any])
    """Gradients of the arguments."""

    gradients: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """Gradients by parameter; zeros for one that is not used."""

    dropped: dict[str, set[tuple[int, ...]]] = field(default_factory=dict[str, Any])
    """Shapes of what is given to each dropout: by name of the module, or by line of a call of the function."""

    strided: set[str] = field(default_factory=set[str])
    """Dropouts that were given a tensor that is not contiguous."""


def run_whole(block: nn.Module, call: BlockCall, hidden: int | str) -> BlockRun:
    """Run a block forward and backward; `hidden`: place or name of the hidden states."""
    return _run(nn.ModuleDict({"block": copy.deepcopy(block)}), call, hidden)


def run_parts(
    block: nn.Module, call: BlockCall, hidden: int | str, plan: Mapping[str, Any], ranks: int, *, tuples: bool
) -> list[BlockRun] | BaseException:
    """Run a block's parts side by side, cut by the classes of a script; return what went wrong if they do not run.

    `plan` are the fields of the script's Plan; `tuples`: whether the block returns a tuple, whose first item are the
    hidden states.
    """
    cutter_class = _cutter_of_script(plan, ranks, hidden, tuples=tuples)

    def run(rank: int, exchange: ThreadExchange) -> BlockRun:
        model = nn.ModuleDict({"block": copy.deepcopy(block)})
        cutter = cutter_class(_Seat(rank, exchange))
        cutter.cut(model)
        cutter.parts.between(model, ("block",))
        return _run(model, call, hidden)

    return run_in_threads(ranks, run)


def _run(model: nn.ModuleDict, call: BlockCall, hidden: int | str) -> BlockRun:
    run, block = BlockRun(), model["block"]
    args, kwargs = tree_map(_fresh, copy.deepcopy(call))
    (kwargs[hidden] if isinstance(hidden, str) else args[hidden]).requires_grad_()

    def look(module: nn.Module, given: tuple[Tensor, ...], name: str) -> None:
        run.dropped.setdefault(name, set()).add(tuple(given[0].shape))
        if not given[0].is_contiguous():
            run.strided.add(name)

    for name, module in block.named_modules():
        if isinstance(module, nn.Dropout) and module.p > 0:
            module.register_forward_pre_hook(partial(look, name=name))
    with torch.enable_grad(), _Watch(run):
        out = block(*args, **kwargs)
    generator = torch.Generator().manual_seed(1)
    total = torch.zeros((), dtype=torch.float64)
    for x in tree_leaves(out):
        if isinstance(x, Tensor) and x.is_floating_point():
            run.outputs.append(x.detach())
            total = total + (x * torch.randn(x.shape, generator=generator, dtype=torch.float64)).sum()
    total.backward()
    run.inputs = [x.grad for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.requires_grad]
    run.gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in block.named_parameters()}
    return run


def _fresh(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return x
    made = x.detach().double() if x.is_floating_point() else x.detach()
    return made.requires_grad_(x.requires_grad)


@final
class _Watch(TorchFunctionMode):
    """Mode that notes calls of dropout that no nn.Dropout makes, by their lines."""

    def __init__(self, run: BlockRun) -> None:
        super().__init__()
        self._run = run

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (F.dropout, torch.dropout):
            frames = frames_to(BLOCK)
            if not isinstance(innermost_module(frames), nn.Dropout):
                x: Tensor = args[0] if args else kwargs["input"]
                self._run.dropped.setdefault(line_of(frames), set()).add(tuple(x.shape))
        return func(*args, **kwargs)


def _cutter_of_script(plan: Mapping[str, Any], ranks: int, hidden: int | str, *, tuples: bool) -> Any:
    """Return the class of a script that cuts blocks, as it is written there, for one block."""
    flags: dict[str, bool] = dict.fromkeys(("sequence", "numbers", "dropouts", "transposed", "behind", "masks"), True)
    flags |= {"wholes": False, "tuples": tuples, "hiddennamed": isinstance(hidden, str)}
    texts = [read_template(__package__ or "", f"{name}.txt") for name in ("tensor", "sequence")]
    text = "\n".join(render_template(text, flags, {"tensor": str(ranks), "plans": ""}) for text in texts)
    names: dict[str, Any] = {"torch": torch, "nn": nn, "F": F, "Tensor": Tensor, "Any": Any, "dataclass": dataclass}
    names |= {"Mapping": Mapping, "Sequence": Sequence, "dist": _DIST, "TENSOR": ranks, "HIDDEN": hidden}
    exec(f"from __future__ import annotations\n\n{text}", names)
    names["PLANS"] = [names["Plan"](blocks=("block",), **plan)]
    return names["Cutter"]


@dataclass(frozen=True)
class _Seat:
    """Rank among threads, in the place of a process group."""

    rank: int
    exchange: ThreadExchange


def _all_gather(parts: list[Tensor], part: Tensor, group: _Seat) -> None:
    for own, given in zip(parts, group.exchange(group.rank, part), strict=True):
        own.copy_(given)


def _reduce_scatter(out: Tensor, parts: list[Tensor], group: _Seat) -> None:
    out.copy_(torch.stack([given[group.rank] for given in group.exchange(group.rank, parts)]).sum(0))


def _rank_of(group: _Seat) -> int:
    return group.rank


_DIST = SimpleNamespace(get_rank=_rank_of, all_gather=_all_gather, reduce_scatter=_reduce_scatter)
"""Collectives over threads, under the names of torch.distributed."""
