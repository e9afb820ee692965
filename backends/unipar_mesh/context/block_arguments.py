"""Arguments of a block: its hidden states, and which of its other tensors have a dimension of positions."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor, nn

from unipar.errors import TaskError
from unipar_mesh.context.sequence_layout import SequenceLayout

Kind = Literal["whole numbers", "yes or no", "numbers"]

_LAYOUTS: tuple[tuple[str, str, int | None], ...] = (
    ("T", "any", 0),  # numbers of positions
    ("B", "any", None),  # one number a sample
    ("W", "numbers", None),  # one number a column of the hidden states
    ("bT", "whole numbers", 1),  # numbers of positions, for each sample
    ("bT", "numbers", 1),  # one number a token
    ("bT", "numbers", None),  # a mask of keys
    ("bT", "yes or no", None),  # a mask of keys
    ("Bo", "any", None),
    ("Tx", "any", 0),  # a rotary table, or rows of a mask
    ("bTx", "any", 1),  # a rotary table, or something for each token
    ("xTT", "any", 1),  # rows of a mask
    ("TTx", "any", 0),  # a bias for pairs of positions
    ("T1x", "any", 0),
    ("x1T", "any", None),  # a mask of keys
    ("Boo", "any", None),  # another sequence
    ("bTxx", "any", 1),
    ("bxTx", "any", 2),
    ("xxTT", "any", 2),  # rows of a mask
    ("bx1T", "any", None),  # a mask of keys
    ("T11x", "any", 0),
    ("Booo", "any", None),
)
"""Shapes of a block's arguments, of what kind, and the dimension that is cut.

T: positions, B: samples, b: samples or 1, W: width of the hidden states, o: any but T, x: any.
"""


def position_dimension(tensor: Tensor, hidden: Tensor, layout: SequenceLayout, where: str) -> int | None:
    """Return the dimension of an argument that goes along the sequence, or None; raise where that cannot be told."""
    shape, length, n = tuple(tensor.shape), layout.length, layout.count()
    batch, width = hidden.shape[0], hidden.shape[-1]
    if shape == (batch, n, width) and n != length:
        raise TaskError(
            f"parallel.context: {where} has {n} positions, as many as this rank's part of {length}: whether they are "
            "the same is not known; take another length"
        )
    if length not in shape:
        return None
    kind = _kind(tensor)
    if len(shape) == 2 and "mask" in where and kind == "numbers" and shape[0] in {1, batch} - {length}:
        return None  # a mask of keys
    letters = {"T": {length}, "B": {batch}, "b": {1, batch}, "W": {width}, "1": {1}}
    fits = {
        cut
        for pattern, kinds, cut in _LAYOUTS
        if len(pattern) == len(shape)
        and kinds in ("any", kind)
        and all(s != length if p == "o" else p == "x" or s in letters[p] for p, s in zip(pattern, shape, strict=True))
    }
    if len(fits) == 1:
        return fits.pop()
    raise TaskError(
        f"parallel.context: {where} has the shape {shape}, and with {batch} samples of {length} positions and a width "
        f"of {width} "
        + ("that can mean several things" if fits else "none of its dimensions is known to be the sequence")
        + ", so it is not known what to cut over ranks: take another batch.micro or length, or make the tensor "
        "inside the block"
    )


def _kind(tensor: Tensor) -> Kind:
    if str(tensor.dtype) == "torch.bool":
        return "yes or no"
    return "numbers" if tensor.is_floating_point() or tensor.is_complex() else "whole numbers"


class Arguments:
    """Arguments of one call of a block, with words for each."""

    def __init__(self, name: str, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.name, self.args, self.kwargs = name, args, kwargs
        parameters = inspect.signature(type(block).forward).parameters.values()
        named = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][1:]
        self._named = [named[i] if i < len(named) else f"argument {i + 1}" for i in range(len(args))]

    @property
    def hidden(self) -> Tensor:
        """Hidden states: the first argument that is a tensor of numbers."""
        for value in (*self.args, *self.kwargs.values()):
            if isinstance(value, Tensor) and value.is_floating_point():
                if value.dim() == 3:
                    return value
                raise TaskError(
                    f"parallel.context: {self.name} gets hidden states of shape {tuple(value.shape)}; only those "
                    "of shape (batch, sequence, width) can be cut along the sequence"
                )
        raise TaskError(
            f"parallel.context: {self.name} gets no hidden states of shape (batch, sequence, width): name the blocks "
            "that do in model.blocks"
        )

    def changed(self, change: Callable[[Tensor, str], Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with each tensor replaced; `change` gets the tensor, and words for it."""
        words = f"of {self.name}"
        return (
            tuple(_changed(v, change, f"{name} {words}") for v, name in zip(self.args, self._named, strict=True)),
            {name: _changed(v, change, f"{name} {words}") for name, v in self.kwargs.items()},
        )


def _changed(value: Any, change: Callable[[Tensor, str], Tensor], where: str) -> Any:
    if isinstance(value, Tensor):
        return change(value, where)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_changed(v, change, where) for v in value))
    if isinstance(value, (tuple, list)):
        return type(value)(_changed(v, change, where) for v in value)
    if isinstance(value, dict):
        return type(value)((k, _changed(v, change, where)) for k, v in value.items())
    return value
