"""Trial of a block on a part of a sequence: whether positions meet in attention only, and are given as arguments."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from unipar.distributed.device import has_own_memory
from unipar.errors import TaskError
from unipar_mesh.context.block_arguments import Arguments
from unipar_mesh.context.sequence_layout import SequenceLayout

ENOUGH = 3
"""Positions that a rank needs for a trial: the first and the last are changed, and those between must not change."""


def examine(
    arguments: Arguments,
    block: nn.Module,
    plain: Callable[..., Any],
    layout: SequenceLayout,
    dimension_of: Callable[[Tensor], int | None],
    inside: Callable[[], AbstractContextManager[Any]],
) -> bool:
    """Run a block twice with attention that does not look around; return whether that was enough to tell.

    `arguments`: this rank's part; `dimension_of`: which dimension of an argument is cut; `inside`: a mode in which
    attention returns something of its own position only. Raise a TaskError where positions meet elsewhere, or where
    equal inputs give other results at other places.
    """
    hidden, n = arguments.hidden, layout.count()
    alike = hidden.detach()[:, :1].expand_as(hidden).clone()
    moved = alike.clone()
    moved[:, 0], moved[:, -1] = 1.0 - 2.0 * alike[:, 0], 1.0 - 3.0 * alike[:, -1]
    batch = hidden.shape[0]
    results = [_rows(arguments, block, plain, (batch, n), x, dimension_of, inside) for x in (alike, moved)]
    for equal, changed in zip(*results, strict=True):
        allowed = _row_tolerance(equal) * float(equal.abs().max())
        if n >= ENOUGH and float((equal - changed)[:, 1:-1].abs().max()) > allowed:
            raise TaskError(
                f"parallel.context: {arguments.name} mixes positions outside of scaled_dot_product_attention, and a "
                f"rank has {n} of {layout.length}: compute attention by torch's scaled_dot_product_attention "
                "(transformers: "
                'attn_implementation="sdpa"), or split by parallel.tensor or parallel.pipeline instead'
            )
        if float((equal - equal[:, :1]).abs().max()) > allowed:
            raise TaskError(
                f"parallel.context: {arguments.name} counts positions by itself (equal inputs give other results at "
                f"other places), and on a rank it would count those of its part, {n} of {layout.length}: compute what "
                "depends on positions before the blocks and pass it to them (rotary tables, position_ids)"
            )
    return min(layout.count(rank) for rank in range(layout.ranks)) >= ENOUGH  # the same on all ranks


def _row_tolerance(tensor: Tensor) -> float:
    """Return by how much of the largest value equal rows may differ: a product's rows may have different kernels."""
    if torch.is_autocast_enabled(tensor.device.type) or tensor.dtype in (torch.float16, torch.bfloat16):
        return 2e-2
    return 1e-11 if tensor.dtype is torch.float64 else 2e-5


def _rows(
    arguments: Arguments,
    block: nn.Module,
    plain: Callable[..., Any],
    shape: tuple[int, int],
    hidden: Tensor,
    dimension_of: Callable[[Tensor], int | None],
    inside: Callable[[], AbstractContextManager[Any]],
) -> list[Tensor]:
    """Return what the block puts out, and what its modules are given, for these hidden states; it is left as it was."""
    before = arguments.hidden
    rows: list[Tensor] = []

    def replaced(tensor: Tensor, _: str) -> Tensor:
        dimension = dimension_of(tensor)
        if tensor is before or dimension is None:
            return hidden if tensor is before else tensor
        return tensor.detach().narrow(dimension, 0, 1).expand_as(tensor)

    def keep(value: Any) -> None:
        if isinstance(value, Tensor) and value.is_floating_point() and value.dim() == 3 and value.shape[:2] == shape:
            rows.append(value.detach().clone())

    def look(_: nn.Module, args: tuple[Any, ...]) -> None:
        for value in args:
            keep(value)

    buffers = [(buffer, buffer.clone()) for buffer in block.buffers()]
    args, kwargs = arguments.changed(replaced)
    devices = [hidden.device] if has_own_memory(hidden.device) else []
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.random.fork_rng(devices, device_type=hidden.device.type if devices else "cuda"))
        for module in block.modules():
            if module is not block:
                stack.callback(module.register_forward_pre_hook(look).remove)
        stack.enter_context(inside())
        try:
            result = plain(
                *map(_without_cache, args), **{name: _without_cache(value) for name, value in kwargs.items()}
            )
        except TaskError:
            raise
        except Exception as error:
            raise does_not_run(arguments.name, shape[1], error) from error
        finally:
            for buffer, value in buffers:
                buffer.copy_(value)
    keep(result[0] if isinstance(result, tuple) else result)
    return rows


def does_not_run(name: str, positions: int, error: Exception) -> TaskError:
    """Return the error of a block that cannot compute with a part of the positions."""
    reason = str(error).strip().partition("\n")[0]
    return TaskError(
        f"parallel.context: {name} does not run on {positions} positions, a rank's part ({reason}): "
        'attention must be torch\'s scaled_dot_product_attention (transformers: attn_implementation="sdpa"), '
        "and what goes along the sequence an argument of the block"
    )


def _without_cache(value: Any) -> Any:
    """Return an argument, or None in place of a cache of keys, which the trial would add to."""
    return None if hasattr(value, "update") and not isinstance(value, (dict, nn.Module, Tensor)) else value
