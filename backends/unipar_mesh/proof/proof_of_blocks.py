"""Proof by blocks, for models whose gradients rank 0 cannot hold: a block of each kind is that of the whole model.

A forward without gradients runs through the whole model, and one through the split model. Only within the blocks that
are looked at gradients are on: from their inputs, detached, to a fixed projection of their outputs. So rank 0 has the
gradients of one block at a time, and the whole model's loss is compared as well.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from unipar.backend import Fn, Region
from unipar.engines.batch_transfer import map_tensors
from unipar.engines.fingerprint import TensorSketcher, collect_tensors, sketch_whole_tensor
from unipar.engines.wrapper import WrapperEngine
from unipar.errors import TaskError
from unipar_mesh.context import SequenceSplit
from unipar_mesh.context.spread_attention import gather_sequence
from unipar_mesh.look_at_model import ModelFacts, kind_of_block
from unipar_mesh.pipeline.stage import is_left_out
from unipar_mesh.proof.proof_of_model import (
    evaluation_without_autocast,
    off_by_length,
    regions_of_gradients,
    sketch_regions,
    split_error,
    tolerances,
)
from unipar_mesh.tensor.cuts import BlockPlan
from unipar_mesh.trials_without_trace import modules_not_fused, unchanged

_LOG = logging.getLogger("unipar")

UNPROVED = (
    "options.native.proof: off: nothing was compared before the first step, so it is not proved that the split model "
    "is the whole one; `unipar verify` compares whole steps"
)


@dataclass(frozen=True)
class BlockShapes:
    """Shapes of what a block of the whole model gets and puts out, and its parameters that have a gradient."""

    output: tuple[int, ...]
    inputs: Sequence[tuple[int, ...]]
    parameters: Sequence[str]


@dataclass(frozen=True)
class WholeBlocks:
    """Loss of the whole model, and what its blocks compute on the sample: the split model's must agree with it."""

    loss: float
    blocks: Mapping[str, BlockShapes]
    """Blocks that were looked at, in the order in which they ran."""

    rows: Mapping[str, Tensor]
    """Sketches of outputs, of gradients of inputs, and, by name, of gradients of parameters."""


@dataclass(frozen=True)
class _BlockRun:
    name: str
    inputs: Sequence[Tensor]
    """Inputs as leaves that take a gradient: hidden states, not masks or tables of positions."""

    output: Tensor


def blocks_to_prove(model: nn.Module, facts: ModelFacts, plans: Mapping[str, BlockPlan]) -> list[str]:
    """Return the first block of each kind, plan and stage."""
    chosen: list[str] = []
    kinds: list[Any] = []
    for number, name in enumerate(facts.blocks):
        stage = next(stage for stage, end in enumerate(facts.cuts[1:]) if number < end)
        alike = kind_of_block(model.get_submodule(name)), plans.get(name), stage
        if alike not in kinds:
            kinds.append(alike)
            chosen.append(name)
    return chosen


def sketch_blocks(model: nn.Module, fn: Fn, batch: Any, names: Sequence[str]) -> WholeBlocks:
    """Return loss and sketches of blocks of the whole model, in evaluation mode, which draws no random numbers."""
    first_name = {id(p): name for name, p in model.named_parameters()}
    sketches = TensorSketcher(keep=False)
    blocks: dict[str, BlockShapes] = {}
    rows: dict[str, Tensor] = {}

    def note(label: str, tensor: Tensor) -> None:
        sketch = sketch_whole_tensor(sketches, label, tensor)
        rows[label] = rows[label] + sketch if label in rows else sketch  # a parameter that two blocks share

    def look(run: _BlockRun) -> None:
        trained = {first_name[id(p)]: p for p in model.get_submodule(run.name).parameters() if p.requires_grad}
        wanted = [*trained.values(), *run.inputs]
        loss = (run.output * _projection(run.output.shape, run.output)).sum()
        gradients = cast("tuple[Tensor | None, ...]", torch.autograd.grad(loss, wanted, allow_unused=True))
        for name, gradient in zip(trained, gradients, strict=False):
            if gradient is not None:
                note(name, gradient)
        for i, (x, gradient) in enumerate(zip(run.inputs, gradients[len(trained) :], strict=True)):
            note(_input_label(run.name, i), torch.zeros_like(x) if gradient is None else gradient)
        note(_output_label(run.name), run.output)
        used = [name for name, gradient in zip(trained, gradients, strict=False) if gradient is not None]
        blocks[run.name] = BlockShapes(tuple(run.output.shape), [tuple(x.shape) for x in run.inputs], used)

    with unchanged(model, fn):
        model.eval()
        with torch.no_grad(), modules_not_fused(), _gradients_within(model, names, look):
            loss = float(fn(model, batch))
    return WholeBlocks(loss, blocks, rows)


def prove_blocks(
    engine: WrapperEngine,
    fn: Fn,
    batch: Any,
    full: WholeBlocks,
    *,
    sequences: SequenceSplit | None,
    dtype: torch.dtype,
    words: str,
) -> None:
    """Raise TaskError unless the split model has the whole one's loss, and its blocks the outputs and gradients.

    `sequences` are given where each rank has a part of each sequence.
    """
    loss, rows = _split_blocks(engine, fn, batch, full, sequences)
    if (what := describe_difference(full, loss, rows, dtype)) is not None:
        raise split_error(what, words)


def describe_difference(full: WholeBlocks, loss: float, rows: Mapping[str, Tensor], dtype: torch.dtype) -> str | None:
    """Return in words what the split model computes otherwise: in the first block that does, else its loss."""
    small_loss, small = tolerances(full.loss, dtype)
    losses = f"a loss of {loss:.9g} for {full.loss:.9g}"
    same_loss = abs(loss - full.loss) <= small_loss * max(1.0, abs(full.loss))
    for name, block in full.blocks.items():
        gradients = [*block.parameters, *(_input_label(name, i) for i in range(len(block.inputs)))]
        differing: list[str] = []
        for labels, what in (([_output_label(name)], ""), (gradients, "the gradient of ")):
            if labels:
                off = off_by_length(*(torch.stack([known[label] for label in labels]) for known in (rows, full.rows)))
                worst = int(off.argmax())
                if float(off[worst]) > small:
                    differing.append(f"{what}{labels[worst]} is off by {float(off[worst]):.1e} of its length")
        if differing:
            return f"{'' if same_loss else f'{losses}, and '}in {name}, run by itself, {', and '.join(differing)}"
    if same_loss:
        return None
    return (
        f"{losses}, while a block of each kind ({', '.join(full.blocks)}) has the right output and gradients, so that "
        "what differs lies between blocks or outside of them"
    )


def say_unproved(rank: int) -> None:
    """Write a line into the log of rank 0: the model is not proved."""
    if rank == 0:
        _LOG.warning(UNPROVED)


def _split_blocks(
    engine: WrapperEngine, fn: Fn, batch: Any, full: WholeBlocks, sequences: SequenceSplit | None
) -> tuple[float, dict[str, Tensor]]:
    """Return the split model's loss, and sketches by the labels of the whole one's, on every rank."""
    world, runs = engine.world, list[_BlockRun]()
    with (
        evaluation_without_autocast(engine, fn),
        torch.no_grad(),
        _gradients_within(engine.model, list(full.blocks), runs.append),
    ):
        loss = float(engine.run_forward(fn, batch))
    if runs:
        losses = [_projected(run.output, full.blocks[run.name].output, sequences) for run in runs]
        (torch.stack(losses).sum() * (engine.divisor / world.data_size)).backward()
    engine.finish_reduction()
    engine.before_state_access()
    ranks = world.mesh.ranks // world.mesh.sizes["pipeline"]

    def regions() -> Iterator[tuple[str, int, Region, Tensor]]:
        yield from regions_of_gradients(engine)
        for run in runs:
            for label, tensor in _tensors_of_run(run, full.blocks[run.name], sequences):
                yield label, tensor.numel(), Region(0, tensor.numel()), tensor / ranks  # all of them have the whole

    rows = world.sum(sketch_regions(list(full.rows), regions()).to(world.device)).cpu()
    engine.optimizer.zero_grad()
    share = torch.full((), loss / world.data_size, dtype=torch.float64, device=world.device)
    return float(world.sum_over_data(share)), dict(zip(full.rows, rows, strict=True))


def _tensors_of_run(
    run: _BlockRun, block: BlockShapes, sequences: SequenceSplit | None
) -> Iterator[tuple[str, Tensor]]:
    """Yield output and gradients of inputs, with whole sequences.

    What a rank of context computes from a part of a sequence has the gradient of all ranks' losses.
    """
    yield _output_label(run.name), _whole_sequence(run.output.detach(), block.output, sequences)
    for i, (x, shape) in enumerate(zip(run.inputs, block.inputs, strict=True)):
        gradient = torch.zeros_like(x) if x.grad is None else x.grad
        full = _whole_sequence(gradient, shape, sequences)
        yield (
            _input_label(run.name, i),
            full / sequences.group.size() if sequences and full is not gradient else full,
        )


def _whole_sequence(part: Tensor, shape: tuple[int, ...], sequences: SequenceSplit | None) -> Tensor:
    if tuple(part.shape) == shape or sequences is None:
        return part
    return gather_sequence(part, 1, sequences.layout(shape[1]), sequences.group)


def _projected(output: Tensor, shape: tuple[int, ...], sequences: SequenceSplit | None) -> Tensor:
    """Return the loss of a block: the sum of its output, each element times a fixed random number."""
    factors = _projection(shape, output)
    if tuple(output.shape) == shape or sequences is None:
        return (output * factors).sum()
    mine = factors.index_select(1, sequences.layout(shape[1]).positions(output.device))
    return (output * mine).sum() * sequences.group.size()  # FSDP2 will divide by the ranks that add up


def _projection(shape: Sequence[int], like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(tuple(shape), generator=generator).to(like.device, like.dtype)


def _output_label(name: str) -> str:
    return f"the output of {name}"


def _input_label(name: str, i: int) -> str:
    return f"input {i + 1} of {name}"


@contextmanager
def _gradients_within(model: nn.Module, names: Sequence[str], done: Callable[[_BlockRun], None]) -> Generator[None]:
    """Context manager: gradients are on within these blocks when they first run, and off again behind them."""
    handles: list[Any] = []
    ran: set[str] = set()
    open_runs: dict[str, list[Tensor]] = {}

    def enter(name: str) -> Any:
        def hook(block: nn.Module, args: Any, kwargs: Any) -> Any:
            if name in ran or is_left_out(block):
                return None
            ran.add(name)
            leaves: dict[int, tuple[Tensor, Tensor]] = {}
            floats = [t for t in collect_tensors((args, kwargs)) if t.is_floating_point()]

            def as_leaf(t: Tensor) -> Tensor:
                hidden = floats and t.is_floating_point() and (t.ndim, t.shape[-1:]) == (floats[0].ndim, width)
                if not hidden:
                    return t.detach() if t.requires_grad else t  # another output of a block before
                if id(t) not in leaves:
                    leaf = t.detach().clone().requires_grad_()
                    leaves[id(t)] = leaf, leaf.clone()  # a block may change what it gets in place; a leaf it may not
                return leaves[id(t)][1]

            width = floats[0].shape[-1:] if floats else None
            torch.set_grad_enabled(True)
            changed = map_tensors(args, as_leaf), map_tensors(kwargs, as_leaf)
            open_runs[name] = [leaf for leaf, _ in leaves.values()]
            return changed

        return hook

    def leave(name: str) -> Any:
        def hook(block: nn.Module, args: Any, out: Any) -> None:
            if name not in open_runs:
                return
            inputs = open_runs.pop(name)
            output = next((t for t in collect_tensors(out) if t.is_floating_point()), None)
            if output is None or not output.requires_grad:
                torch.set_grad_enabled(False)
                raise TaskError(
                    f"options.native.proof: blocks needs blocks that return a tensor with gradients, and what {name} "
                    f"returns ({type(out).__name__}) has none: set proof: whole"
                )
            done(_BlockRun(name, inputs, output))
            torch.set_grad_enabled(False)

        return hook

    try:
        for name in names:
            block = model.get_submodule(name)
            handles.append(block.register_forward_pre_hook(enter(name), with_kwargs=True, prepend=True))
            handles.append(block.register_forward_hook(leave(name)))
        yield
    finally:
        for handle in handles:
            handle.remove()
