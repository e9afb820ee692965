"""Check of a block that a script cuts: its parts, run side by side in threads, compute what the whole block does."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from typing_extensions import override

from unipar_mesh.scripts.look_at_calls import BlockCall
from unipar_mesh.scripts.mesh_parts import ArgumentPlace, Blocks, CutPlan, Ranks
from unipar_mesh.tensor.cuts import BlockPlan, cut_parameters
from unipar_mesh.tensor.sites import BLOCK, frames_to, innermost_module, line_of

_ALLOWED: Final = 1e-5
"""Part of the largest value by which parts may be off: some layers compute in fp32 whatever they are given."""


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


def prepared_for_check(block: nn.Module) -> nn.Module:
    """Return a copy in double precision, in evaluation, with random matrices that are large enough to matter."""
    double_block = copy.deepcopy(block).double().eval()
    generator = torch.Generator().manual_seed(0)
    for p in double_block.parameters():
        if p.ndim > 1:
            p.data.normal_(std=p.shape[-1] ** -0.5, generator=generator)
    return double_block


def run_whole(block: nn.Module, call: BlockCall) -> BlockRun:
    """Run a block forward and backward."""
    return _run(copy.deepcopy(block), call)


def run_parts(
    block: nn.Module, call: BlockCall, plan: CutPlan, ranks: int, hidden: ArgumentPlace | None = None
) -> list[BlockRun] | BaseException:
    """Run a block's parts side by side, cut as in a script; return what went wrong if they do not run.

    `hidden`: place or name of the hidden states, if these are in parts along the sequence as well.
    """
    exchange = ThreadExchange(ranks)
    plan = replace(plan, blocks=("block",))

    def run(rank: int) -> BlockRun:
        model = nn.ModuleDict({"block": copy.deepcopy(block)})
        blocks = Blocks(Ranks(rank, exchange), [plan], hidden)
        blocks.cut_blocks(model)
        if hidden is not None:
            blocks.between(model, ["block"])
        return _run(model["block"], call)

    return exchange.run(run)


@dataclass(frozen=True)
class Mismatch:
    """Result of a block's parts that is not that of the whole."""

    what: str
    off: str
    """Difference in numbers."""


def compare_runs(block: nn.Module, plan: BlockPlan, reference: BlockRun, runs: list[BlockRun]) -> Mismatch | list[str]:
    """Return the parameters whose gradients are to be added up over the ranks, or what is not as in the whole block."""
    for run in runs:
        for what, ours, theirs in (
            ("the result", run.outputs, reference.outputs),
            ("the gradient of what it is given", run.inputs, reference.inputs),
        ):
            for a, b in zip(ours, theirs, strict=True):
                if (a is None) != (b is None):
                    return Mismatch(what, "there is none")
                if a is not None and b is not None and _off(a, b) > _ALLOWED:
                    difference = float((a - b).abs().max()) if a.shape == b.shape else float("inf")
                    return Mismatch(what, f"off by {difference:.1e} of {float(b.abs().max()):.1e}")
    cuts = cut_parameters(block, plan)
    most = max(float(g.abs().max()) for g in reference.gradients.values())
    partial_names: list[str] = []
    for name, expected in reference.gradients.items():
        gradients = [run.gradients[name] for run in runs]
        if name in cuts:
            worst = max(_off(g, cuts[name].local(expected, rank), most) for rank, g in enumerate(gradients))
        else:
            each = max(_off(g, expected, most) for g in gradients)
            added = _off(torch.stack(gradients).sum(0), expected, most)
            worst = min(each, added)
            partial_names += [name] * (each > _ALLOWED)
        if worst > _ALLOWED:
            return Mismatch(f"the gradient of {name}", f"off by {worst:.1e} of 1")
    return partial_names


def _off(a: Tensor, b: Tensor, most: float = 0.0) -> float:
    """Return by which part of its largest value a result is off; tiny ones are measured by a part of `most`."""
    if a.shape != b.shape:
        return float("inf")
    return float((a - b).abs().max()) / max(float(b.abs().max()), 1e-3 * most, 1e-30)


def _run(block: nn.Module, call: BlockCall) -> BlockRun:
    run, leaves = BlockRun(), list[Tensor]()
    args, kwargs = tree_map(partial(_double, leaves), copy.deepcopy(call))

    def look(module: nn.Module, inputs: tuple[Tensor, ...], name: str) -> None:
        run.dropped.setdefault(name, set()).add(tuple(inputs[0].shape))
        if not inputs[0].is_contiguous():
            run.strided.add(name)

    for name, module in block.named_modules():
        if isinstance(module, nn.Dropout) and module.p > 0:
            module.register_forward_pre_hook(partial(look, name=name))
    with torch.enable_grad(), _Watch(run):
        out = block(*args, **kwargs)
    generator = torch.Generator().manual_seed(1)
    total = torch.zeros((), dtype=torch.float64)
    for x in _floats(out):
        run.outputs.append(x.detach())
        total = total + (x * torch.randn(x.shape, generator=generator, dtype=torch.float64)).sum()
    total.backward()
    run.inputs = [x.grad for x in leaves if x.requires_grad]
    run.gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in block.named_parameters()}
    return run


def _double(leaves: list[Tensor], x: Any) -> Any:
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return x
    leaves.append(x.detach().double().requires_grad_(x.requires_grad or not leaves))  # at least the hidden states
    return leaves[-1].clone()  # a block may change it in place


def _floats(values: Any) -> Iterator[Tensor]:
    return (x for x in tree_leaves(values) if isinstance(x, Tensor) and x.is_floating_point())


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


@final
class ThreadExchange:
    """Ranks that are threads, with the collectives of torch.distributed; a group is the number of the rank itself."""

    def __init__(self, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks)
        self._values: list[Any] = [None] * ranks

    def run(self, run: Callable[[int], Any]) -> list[Any] | BaseException:
        """Return what a function returns on each rank, all of which run side by side; or what went wrong on one."""
        results: list[Any] = [*self._values]
        errors: list[BaseException] = []

        def guarded(rank: int) -> None:
            try:
                results[rank] = run(rank)
            except BaseException as e:  # the others wait, whatever happened here
                errors.append(e)
                self._barrier.abort()

        threads = [threading.Thread(target=guarded, args=(rank,)) for rank in range(len(results))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        causes = [e for e in errors if not isinstance(e, threading.BrokenBarrierError)]
        return causes[0] if causes else results

    def _from_all(self, group: int, value: Any) -> list[Any]:
        self._values[group] = value
        self._barrier.wait(timeout=600)
        received = [*self._values]
        self._barrier.wait(timeout=600)
        return received

    def get_rank(self, group: int) -> int:
        """Return the rank itself."""
        return group

    def get_world_size(self, group: int) -> int:
        """Return the number of ranks."""
        return len(self._values)

    def all_reduce(self, x: Tensor, group: int) -> None:
        """Add up over the ranks."""
        x.copy_(torch.stack(self._from_all(group, x.clone())).sum(0))

    def all_gather(self, parts: list[Tensor], part: Tensor, group: int) -> None:
        """Let each rank have the parts of all."""
        for own, received in zip(parts, self._from_all(group, part), strict=True):
            own.copy_(received)

    def reduce_scatter(self, out: Tensor, parts: list[Tensor], group: int) -> None:
        """Let each rank have its part of the sum."""
        out.copy_(torch.stack([received[group] for received in self._from_all(group, parts)]).sum(0))
