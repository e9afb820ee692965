"""Hooks that cut a sequence over ranks where the first block takes it, and gather it behind the last block.

Embeddings, head, loss and metrics see whole sequences. Inside blocks every rank has its positions only, and
`scaled_dot_product_attention` reaches those of all ranks. Each rank's gradients are a part: over the group they are
summed, and the loss is scaled by 1 / ranks, because behind the last block every rank computes the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from unipar.backend import Fn
from unipar.errors import TaskError
from unipar.model import transforms
from unipar_mesh.context.block_arguments import Arguments, position_dimension
from unipar_mesh.context.context_trial import does_not_run, examine
from unipar_mesh.context.inside import BetweenBlocks, InsideBlock, Pass
from unipar_mesh.context.sequence_layout import SequenceLayout
from unipar_mesh.context.spread_attention import Choice, gather_sequence
from unipar_mesh.pipeline.stage import hidden_of_input
from unipar_mesh.sequence.sequence_parts import joined
from unipar_mesh.trials_without_trace import kept_attributes


@final
class SequenceSplit:
    """Cuts the sequence of a model's blocks over a group of ranks, all of which run the same pass together."""

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[str],
        group: dist.ProcessGroup,
        *,
        enters: bool = True,
        leaves: bool = True,
        attention: Choice = "auto",
        examines: bool = True,
    ) -> None:
        """Take the blocks of this rank, in the order in which they run.

        `enters`: the first of them takes whole hidden states, which are cut; if not, it takes this rank's part, and
        `whole_length` tells the length. `leaves`: the last of them puts out whole hidden states. `examines`: each block
        is tried once, which needs values.
        """
        if not blocks:
            raise TaskError(
                f"parallel.context: {group.size()} cuts sequences between the first block and the last, and the model "
                "has no blocks: name them in model.blocks or in the task's blocks()"
            )
        self.names, self.blocks = list(blocks), [model.get_submodule(name) for name in blocks]
        self.group, self.enters, self.leaves = group, enters, leaves
        self.attention: Choice = attention
        self._examines = examines
        self.whole_length = 0
        """Length of the whole sequence, told before each pass where `enters` is false."""

        self.around_trial: Callable[[], AbstractContextManager[None]] = nullcontext
        """Context manager around the forwards in which blocks are tried."""

        self._examined: set[tuple[str, bool]] = set()
        self._run: Pass | None = None
        self._inside: InsideBlock | None = None
        self._handles: list[RemovableHandle] = []
        self._plain: list[Callable[..., Any] | None] = []

    def arm(self) -> None:
        """Put hooks on the blocks and replace their forward; engines call it after their library's hooks are on."""
        for index, (name, block) in enumerate(zip(self.names, self.blocks, strict=True)):
            if getattr(block, "gradient_checkpointing", False):
                raise TaskError(
                    f"parallel.context: {name} recomputes its forward by itself (gradient_checkpointing), where its "
                    "attention would see this rank's part only: leave that out, and set model.recompute: blocks"
                )
            if hasattr(block.forward, "_torchdynamo_orig_callable"):
                raise TaskError(
                    f"parallel.context: {name} is compiled, and compiled attention cannot be cut over ranks: leave "
                    "model.compile out"
                )
            self._plain.append(vars(block).get("forward"))
            self._handles.append(block.register_forward_pre_hook(self._enter(index), with_kwargs=True))
            block.forward = self._forward(index, block.forward)
        transforms.SURROUNDINGS.append(self._again)

    def disarm(self) -> None:
        """Take hooks and forwards away again."""
        for handle in self._handles:
            handle.remove()
        for block, plain in zip(self.blocks, self._plain, strict=False):
            del block.forward
            if plain is not None:
                block.forward = plain
        if self._again in transforms.SURROUNDINGS:
            transforms.SURROUNDINGS.remove(self._again)
        self._handles, self._plain, self._run = [], [], None

    def follow_length(self, first: nn.Module) -> Callable[[], None]:
        """Take the length of the whole sequence from what the model's first block is given; return what undoes it."""

        def tell(block: nn.Module, args: Any, kwargs: Any) -> None:
            self.whole_length = hidden_of_input(args, kwargs).shape[1]

        return first.register_forward_pre_hook(tell, with_kwargs=True, prepend=True).remove

    def widened(self, hidden: Tensor) -> Tensor:
        """Return zeros as wide as hidden states of the whole sequence."""
        return hidden.new_zeros((len(hidden), self.whole_length, *hidden.shape[2:]))

    def run_loss(self, fn: Fn, model: nn.Module, batch: Any) -> Any:
        """Return `fn(model, batch)`, with dropout between blocks as one process draws it."""
        with BetweenBlocks(self._between):
            return fn(model, batch)

    def _between(self) -> InsideBlock | None:
        if self._run is None or self._inside is not None:
            return None
        return InsideBlock("the model, between two blocks,", self._run, self.group, self.attention)

    def layout(self, length: int) -> SequenceLayout:
        """Return which rank has which positions of a sequence of this length."""
        ranks = self.group.size()
        if length < ranks:
            raise TaskError(
                f"parallel.context: a sequence of {length} cannot be cut over {ranks} ranks: leave out sequences "
                "shorter than that, or take fewer ranks"
            )
        return SequenceLayout(length, ranks, self.group.rank())

    def _enter(self, index: int) -> Callable[..., Any]:
        """Return the hook that cuts what a block is given."""
        name = self.names[index]

        def hook(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            arguments = Arguments(name, block, args, kwargs)
            hidden = arguments.hidden
            if index == 0:
                if self._run is not None:
                    raise self._out_of_order(name)
                length = hidden.shape[1] if self.enters else self.whole_length
                self._run = Pass(self.layout(length), hidden.shape[0])
            run = self._run
            if run is None or run.due != index:
                raise self._out_of_order(name)
            is_full = index == 0 and self.enters
            if not is_full and hidden.shape[1] != run.layout.count():
                raise TaskError(
                    f"parallel.context: {name} is given {hidden.shape[1]} positions where this rank has "
                    f"{run.layout.count()} of {run.layout.length}: between the first block and the last, hidden states "
                    "must go from block to block"
                )

            def cut(tensor: Tensor, where: str) -> Tensor:
                if tensor is hidden:
                    return self._cut(run, tensor, 1) if is_full else tensor
                if any(tensor is other for other in run.ours):
                    return tensor
                dimension = position_dimension(tensor, hidden, run.layout, where)
                return tensor if dimension is None else self._cut(run, tensor, dimension)

            return arguments.changed(cut)

        return hook

    def _cut(self, run: Pass, tensor: Tensor, dimension: int) -> Tensor:
        key = (id(tensor), dimension)
        if key not in run.cut:
            run.cut[key] = (tensor, tensor.index_select(dimension, run.layout.positions(tensor.device)))
        return run.cut[key][1]

    def _forward(self, index: int, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Return a block's forward with attention over ranks; the last one's result is gathered."""
        name, last = self.names[index], index == len(self.names) - 1

        def forward(*args: Any, **kwargs: Any) -> Any:
            run = self._run
            assert run is not None
            try:
                self._examine(index, plain, args, kwargs)
                self._inside = InsideBlock(name, run, self.group, self.attention)
                with self._inside:
                    result = plain(*args, **kwargs)
                hidden = _hidden_of(name, result, run.layout)
            except BaseException as error:
                self._run = None
                if not self._examines and type(error) is RuntimeError:  # nobody has tried the block before
                    raise does_not_run(name, run.layout.count(), error) from error
                raise
            finally:
                self._inside = None
            if not last:
                run.due, run.ours = index + 1, [t for t in _items(result) if isinstance(t, Tensor)]
                return result
            self._run = None
            run.cut.clear()  # recomputing keeps the pass until the backward, and has its arguments already
            run.ours.clear()
            if not self.leaves:
                return result
            full = gather_sequence(joined(hidden), 1, run.layout, self.group)
            return (full, *result[1:]) if isinstance(result, tuple) else full

        return forward

    def _examine(self, index: int, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise a TaskError if the block cannot run on a part of the sequence; each block is looked at once."""
        name, block, run = self.names[index], self.blocks[index], self._run
        assert run is not None
        if not self._examines or (name, block.training) in self._examined or run.layout.ranks == 1:
            return

        def dimension(tensor: Tensor) -> int | None:
            for (_, along), (_, part) in run.cut.items():
                if part is tensor or part.shape == tensor.shape:  # FSDP2 may have cast it
                    return along
            return 1 if any(tensor is other for other in run.ours) and tensor.dim() == 3 else None

        def inside() -> InsideBlock:
            return InsideBlock(name, run, self.group, self.attention, trial=True)

        arguments = Arguments(name, block, args, kwargs)
        with self.around_trial(), kept_attributes(list(block.modules())):
            if examine(arguments, block, plain, run.layout, dimension, inside):
                self._examined.add((name, block.training))

    def _again(self) -> AbstractContextManager[Any]:
        """Return what a block's forward needs around it when it is run once more, as it is around it now."""
        inside = self._inside
        return nullcontext() if inside is None else InsideBlock(inside.name, inside.run, self.group, self.attention)

    def _out_of_order(self, name: str) -> TaskError:
        due = self.names[self._run.due if self._run is not None else 0]
        return TaskError(
            f"parallel.context: {name} came where {due} was due: between the first block and the last, the loss must "
            "call each block once, in order"
        )


def _hidden_of(name: str, result: Any, layout: SequenceLayout) -> Tensor:
    """Return the hidden states that a block puts out, this rank's part."""
    hidden = result[0] if isinstance(result, tuple) else result
    if isinstance(hidden, Tensor) and hidden.dim() == 3 and hidden.shape[1] == layout.count():
        return hidden
    shown = f"a tensor of shape {tuple(hidden.shape)}" if isinstance(hidden, Tensor) else f"a {type(hidden).__name__}"
    raise TaskError(
        f"parallel.context: {name} puts out {shown}, where hidden states of {layout.count()} positions were expected "
        "(batch, sequence, width): return them from the block, or set parallel.context: 1"
    )


def _items(result: Any) -> Sequence[Any]:
    return result if isinstance(result, tuple) else (result,)
