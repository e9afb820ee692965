"""Table of a script that cuts sequences: which arguments of the blocks go along them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from unipar.errors import TaskError
from unipar_mesh.context.block_arguments import Arguments, position_dimension
from unipar_mesh.context.context_trial import ENOUGH, examine
from unipar_mesh.context.inside import InsideBlock, Pass
from unipar_mesh.context.sequence_layout import SequenceLayout
from unipar_mesh.scripts.look_at_calls import ModelLook
from unipar_mesh.scripts.mesh_parts import ArgumentPlace
from unipar_mesh.tensor.tensor_model import blocks_by_kind


def table_of_arguments(look: ModelLook, ranks: int) -> tuple[ArgumentPlace, dict[ArgumentPlace, int | None], list[str]]:
    """Return the place or name of hidden states, the dimension of positions of each other argument that is a tensor,
    or None, and sentences on what a script cannot do; raise TaskError for what no engine can cut."""
    blocks, kinds = tuple(look.part.blocks), blocks_by_kind(look.part.module, look.part.blocks, {})
    reasons = [*_refused_blocks(look, [names[0] for names, _ in kinds], ranks)]
    for number, name in enumerate(look.order[: len(blocks) + 1]):
        due = blocks[number % len(blocks)]
        if name != due or len(look.order) > len(blocks):
            raise TaskError(
                f"parallel.context: {look.order[-1] if name == due else name} came where {due} was due: between the "
                "first block and the last, the loss must call each block once, in order"
            )
    hidden: set[ArgumentPlace] = set()
    arguments: dict[ArgumentPlace, int | None] = {}
    for calls in look.calls:
        for name in blocks:
            block = look.part.module.get_submodule(name)
            args, kwargs = calls[name]
            states = Arguments(name, block, args, kwargs).hidden
            layout = SequenceLayout(states.shape[1], ranks, 0)
            for key, value in (*enumerate(args), *kwargs.items()):
                if value is states:
                    hidden.add(key)
                    continue
                for tensor in _tensors(value, f"{key} of {name}", reasons):
                    dim = position_dimension(tensor, states, layout, f"{key} of {name}")
                    if arguments.setdefault(key, dim) != dim:
                        reasons.append(
                            f"parallel.context: argument {key} goes along the sequence in dimension "
                            f"{arguments[key]} in one call of a block and in {dim} in another, so that no table tells "
                            "a script what to cut: give the blocks arguments of the same shape, or leave context out "
                            "of the export"
                        )
    if len(hidden) > 1:
        reasons.append(
            "parallel.context: the loss gives blocks their hidden states in several ways "
            f"({', '.join(map(str, hidden))}), and a script knows one: call all blocks alike"
        )
    for (name, *_), _ in kinds:
        _try_block(name, look, ranks)
    reasons += _refused_draws(look)
    return min(hidden, key=str), arguments, [*dict.fromkeys(reasons)]


def _refused_blocks(look: ModelLook, blocks: Sequence[str], ranks: int) -> Iterator[str]:
    """Yield sentences on blocks that a script cannot cut sequences for; `blocks`: one of each kind."""
    for name in look.passed[:1]:
        yield (
            f"parallel.context: {name} is given what a block before has put out beside the hidden states, which is cut "
            "already, and a script cannot tell that: leave context out of the export"
        )
    for name in blocks:
        block = look.part.module.get_submodule(name)
        if getattr(block, "gradient_checkpointing", False):
            yield (
                f"parallel.context: {name} recomputes its forward by itself (gradient_checkpointing), where its "
                "attention would see this rank's part only: leave that out"
            )
        for inner, module in block.named_modules():
            if isinstance(module, nn.MultiheadAttention):
                yield (
                    f"parallel.context: {name}.{inner} is a torch.nn.MultiheadAttention, whose inner attention a "
                    f"script cannot spread over {ranks} ranks: call F.scaled_dot_product_attention in the block, or "
                    "leave context out of the export"
                )


def _tensors(value: Any, where: str, reasons: list[str]) -> list[Tensor]:
    """Return the tensors of an argument; one that holds them in another way than in tuples is refused."""
    if isinstance(value, Tensor):
        return [value]
    if type(value) is tuple:
        return [tensor for inner in cast("tuple[Any, ...]", value) for tensor in _tensors(inner, where, reasons)]
    if any(isinstance(leaf, Tensor) for leaf in tree_leaves(value)):
        reasons.append(
            f"parallel.context: argument {where} is a {type(value).__name__} of tensors, and a script cuts tensors "
            "and tuples of them: leave context out of the export"
        )
    return []


def _try_block(name: str, look: ModelLook, ranks: int) -> None:
    """Raise a TaskError if a block cannot run on a part of the sequence, as the engine does."""
    block = look.part.module.get_submodule(name)
    longest = max((Arguments(name, block, *calls[name]) for calls in look.calls), key=lambda call: call.hidden.shape[1])
    states = longest.hidden
    layout = SequenceLayout(states.shape[1], ranks, 0)
    cut: dict[int, tuple[Tensor, int]] = {}

    def part(tensor: Tensor, where: str) -> Tensor:
        dim = 1 if tensor is states else position_dimension(tensor, states, layout, where)
        if dim is None:
            return tensor
        made = tensor.index_select(dim, layout.positions(tensor.device))
        cut[id(made)] = made, dim
        return made

    arguments = Arguments(name, block, *longest.changed(part))
    run = Pass(layout, states.shape[0])
    group = cast("dist.ProcessGroup", None)  # a trial sends nothing

    def inside() -> AbstractContextManager[Any]:
        return InsideBlock(name, run, group, "gather", trial=True)

    def dimension(tensor: Tensor) -> int | None:
        return cut[id(tensor)][1] if id(tensor) in cut else None

    long_enough = layout.length >= ENOUGH * ranks
    if not long_enough or not examine(arguments, block, block.forward, layout, dimension, inside):
        raise TaskError(
            f"parallel.context: whether {name} can run on a part of a sequence is tried with at least "
            f"{ENOUGH * ranks} positions for {ranks} ranks, and the first microbatches have fewer: export with "
            "longer sequences"
        )


def _refused_draws(look: ModelLook) -> Iterator[str]:
    for draw in look.draws:
        arguments = draw.arguments
        if draw.drops:
            shape = arguments["input"]
            if not draw.block:
                yield (
                    f"parallel.context: dropout at {draw.line} lies between two blocks, where a script does not draw "
                    "masks of whole sequences: move it into a block, or leave context out of the export"
                )
            elif len(shape) != 3 or shape[:2] != draw.hidden[:2] or not arguments["contiguous"]:
                yield (
                    f"parallel.context: dropout at {draw.line} is given a tensor of shape {tuple(shape)}, and a script "
                    "draws masks for hidden states (batch, sequence, width) only: set its rate to 0, or leave context "
                    "out of the export"
                )
        if draw.function == "scaled_dot_product_attention" and draw.block:
            queries, keys = arguments["query"][-2], arguments["key"][-2]
            if queries != keys:
                yield (
                    f"parallel.context: attention at {draw.line} goes from {queries} positions to {keys} of another "
                    "sequence, which a script does not carry: leave context out of the export"
                )
