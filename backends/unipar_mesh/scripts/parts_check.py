"""Check of a block that a script cuts: its parts, run side by side in threads, put out what the whole block does.

What any check of a block's parts needs is here: the block with telling weights, and ranks that are threads.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map

from unipar_mesh.tensor.cuts import BlockPlan, cut_parameters, is_transposed


def compare_parts(
    block: nn.Module,
    call: tuple[tuple[Any, ...], dict[str, Any]],
    plan: BlockPlan,
    change: Callable[[nn.Module], None],
    dropouts: Collection[str] = (),
) -> str | None:
    """Return how far a block's parts are from the whole, or None if they agree; `change` is made to each part.

    `dropouts`: modules whose inputs must be contiguous, so that a mask is drawn in their order.
    In double precision, in evaluation, with random weights that are large enough for each to matter.
    """
    whole = prepared_for_check(block)
    args, kwargs = tree_map(_double, call)

    def run(rank: int, exchange: ThreadExchange) -> Any:
        with torch.no_grad():
            given, named = copy.deepcopy((args, kwargs))
            return _part(whole, plan, change, rank, exchange)(*given, **named)

    results = run_in_threads(plan.ranks, run)
    if isinstance(results, BaseException):
        return f"{type(results).__name__}: {(str(results).splitlines() or [''])[0]}"
    strided: list[str] = []

    def look(_: nn.Module, inputs: tuple[Tensor, ...], name: str) -> None:
        if not inputs[0].is_contiguous():
            strided.append(name)

    for name in dropouts:
        whole.get_submodule(name).register_forward_pre_hook(partial(look, name=name))
    with torch.no_grad():
        given, named = copy.deepcopy((args, kwargs))
        expected = whole(*given, **named)
    if strided:
        return f"{strided[0]} is given a tensor that is not contiguous, whose mask would be drawn in another order"
    for result in results:
        for a, b in zip(_tensors(result), _tensors(expected), strict=True):
            off = float((a.double() - b.double()).abs().max()) if a.shape == b.shape else float("inf")
            most = float(b.double().abs().max())
            if not off <= ALLOWED_IN_PARTS * most:
                return f"off by {off:.1e} of {most:.1e}"
    return None


ALLOWED_IN_PARTS: Final = 1e-5
"""Share of the largest value by which parts may be off: some layers compute in fp32 whatever they are given."""


def prepared_for_check(block: nn.Module) -> nn.Module:
    """Return a copy in double precision, in evaluation, with random matrices that are large enough to matter."""
    whole = copy.deepcopy(block).double().eval()
    generator = torch.Generator().manual_seed(0)
    for p in whole.parameters():
        if p.ndim > 1:
            p.data.normal_(std=p.shape[-1] ** -0.5, generator=generator)
    return whole


@final
class ThreadExchange:
    """Collective of threads, each of which is a rank."""

    def __init__(self, ranks: int) -> None:
        self.barrier = threading.Barrier(ranks)
        self._given: list[Any] = [None] * ranks

    def __call__(self, rank: int, value: Any) -> list[Any]:
        """Return what all ranks give."""
        self._given[rank] = value
        self.barrier.wait(timeout=600)
        given = [*self._given]
        self.barrier.wait(timeout=600)
        return given


def run_in_threads(ranks: int, run: Callable[[int, ThreadExchange], Any]) -> list[Any] | BaseException:
    """Return what a function returns on each rank, all of which run side by side; or what went wrong on one."""
    exchange = ThreadExchange(ranks)
    results: list[Any] = [None] * ranks
    errors: list[BaseException] = []

    def guarded(rank: int) -> None:
        try:
            results[rank] = run(rank, exchange)
        except BaseException as e:  # the others wait, whatever happened here
            errors.append(e)
            exchange.barrier.abort()

    threads = [threading.Thread(target=guarded, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    told = [e for e in errors if not isinstance(e, threading.BrokenBarrierError)]
    return told[0] if told else results


def _double(x: Any) -> Any:
    return x.detach().double() if isinstance(x, Tensor) and x.is_floating_point() else x


def _tensors(x: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(x) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _part(
    whole: nn.Module, plan: BlockPlan, change: Callable[[nn.Module], None], rank: int, exchange: ThreadExchange
) -> nn.Module:
    block = copy.deepcopy(whole)
    change(block)
    for name, cut in cut_parameters(block, plan).items():
        owner, _, key = name.rpartition(".")
        module: Any = block.get_submodule(owner)
        old = module._parameters[key]
        module._parameters[key] = nn.Parameter(cut.local(old.detach(), rank), requires_grad=old.requires_grad)
    for name, cut in plan.cuts.items():
        module = block.get_submodule(name)
        if is_transposed(module) and cut.kind == "column":
            module.nf //= plan.ranks
        if cut.kind == "row":
            module.forward = _row(module, rank, exchange)
    return block


def _row(module: Any, rank: int, exchange: ThreadExchange) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        out, *others = exchange(rank, F.linear(x, module.weight.T if is_transposed(module) else module.weight))
        for other in others:
            out = out + other
        return out if module.bias is None else out + module.bias

    return forward
