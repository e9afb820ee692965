"""Sums in parts: matrix products and attention of one process, added up as ranks that split them would."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from functools import reduce
from typing import Any, final

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from typing_extensions import override

_ATEN = torch.ops.aten


@contextmanager
def sums_in_parts(tensor: int, context: int) -> Generator[None]:
    """Context manager: add up matrix products in parts, in forward and backward; with 1 and 1 change nothing.

    Ranks that split matrices compute parts of a product and add them, which rounds differently; cutting a batch in
    another way never shows that, because it only changes sums over samples. `tensor` parts stand for these ranks.
    Ranks that split sequences add up over positions, inside attention too: `context` parts.
    """
    if tensor == context == 1:
        yield
        return
    with ExitStack() as stack:
        if context > 1:  # the only kind of attention that is made of products which can be cut
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        stack.enter_context(_ProductsInParts(tensor, context))
        yield


@final
class _ProductsInParts(TorchDispatchMode):
    """Mode below autograd, so that products in the backward pass and in recomputed blocks are cut alike."""

    def __init__(self, tensor: int, context: int) -> None:
        super().__init__()
        self._parts, self._columns, self._batched = max(tensor, context), tensor, context > 1

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # such as numbers in fp8: the product of the tensors inside is cut
        options = kwargs or {}
        if func is _ATEN.mm.default and not options:
            return self._product(torch.mm, *args)
        if func is _ATEN.addmm.default:
            bias, *factors = args
            beta, alpha = options.get("beta", 1), options.get("alpha", 1)
            return beta * bias + alpha * self._product(torch.mm, *factors)
        if func is _ATEN.bmm.default and self._batched and not options:
            return self._product(torch.bmm, *args)
        return func(*args, **options)

    def _product(self, multiply: Any, one: Tensor, other: Tensor) -> Tensor:
        """Return the product, as sums over parts of the inner dimension, for parts of the columns."""
        lefts = one.tensor_split(self._parts, -1)
        columns: list[Tensor] = []
        for block in other.tensor_split(self._columns, -1):
            rights = block.tensor_split(self._parts, -2)
            products = [multiply(a, b) for a, b in zip(lefts, rights, strict=True)]
            columns.append(reduce(torch.add, products))
        return torch.cat(columns, -1)
