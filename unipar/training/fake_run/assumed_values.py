"""`AssumedValues`: which expert a token goes to, and how many elements a mask selects, where tensors have no values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import ceil, prod
from typing import Any, Final, final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary
from typing_extensions import override

_ATEN: Any = torch.ops.aten
_MOST_ELEMENTS: Final = 2**24
"""Largest tensor of whole numbers whose values are computed."""

_BY_RANK: Final = frozenset({_ATEN.topk, _ATEN.sort, _ATEN.argmax, _ATEN.argmin, _ATEN.max, _ATEN.min})
"""Operations that choose places in a row of numbers by their values."""


@final
class AssumedValues(TorchDispatchMode):
    """Mode above fake tensors: it assumes places that are chosen by value, and computes with them what follows.

    Of places that a router chooses each is chosen by one row, and all other rows choose the first ones. Where a
    mask's values are unknown, it selects everything. A single number drawn between 0 and 1 is nearly 1.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self._mode = mode
        self._values: Any = WeakTensorKeyDictionary()
        self.routes = False
        """True if places were assumed."""

        self.draws = False
        """True if a number was assumed that is drawn by chance."""

        self.bounds: set[str] = set()
        """Names of operations of which the most is assumed that they can return."""

    def notes(self) -> Iterator[str]:
        """Yield what was assumed, in sentences."""
        if self.routes:
            yield (
                "the loss sends rows to places that it chooses by value (experts of a mixture): planned is that each "
                "place gets a row and all others go to the first ones, which takes the most memory at once"
            )
        if self.draws:
            yield (
                "the loss draws single numbers by chance, as to leave out a layer: planned is that each is nearly 1, "
                "so that what is left out with a probability is not left out"
            )
        if self.bounds:
            yield (
                f"the loss selects by value ({', '.join(sorted(self.bounds))}): planned is that it selects everything, "
                "so that peaks are upper bounds"
            )

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if all(x in self._values for x in inputs) if inputs else _makes_whole_numbers(func, args, kwargs):
            return self._with_values(func, args, kwargs)
        for x in _written(func, args):
            self._values.pop(x, None)
        if func.overloadpacket is _ATEN.index:
            args = args[0], self._without_masks(args[1])
        try:
            out = func(*args, **kwargs)
        except DynamicOutputShapeException:
            if (most := _MOST.get(func.overloadpacket)) is None:
                raise
            self.bounds.add(func.overloadpacket.__name__)
            return most(*args)
        if func.overloadpacket in _BY_RANK:
            self._choose(func, out, args, kwargs)
        if func.overloadpacket is _ATEN.rand and out.numel() == 1:
            with no_dispatch():
                self._values[out] = torch.full(out.shape, 1 - 2.0**-8, dtype=out.dtype)
            self.draws = True
        return out

    def _with_values(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return what an operation on known values returns, and keep its values."""

        def value(x: Any) -> Any:
            return self._values[x] if isinstance(x, Tensor) else x

        with no_dispatch():
            values = func(*tree_map(value, args), **tree_map(value, kwargs))
        try:
            out = func(*args, **kwargs)
        except (DynamicOutputShapeException, DataDependentOutputException):
            if not isinstance(values, Tensor):
                return values
            out = torch.empty(values.shape, dtype=values.dtype)
        self._keep(out, values)
        return out

    def _keep(self, out: Any, values: Any) -> None:
        for x, known in zip(tree_leaves(out), tree_leaves(values), strict=True):
            if isinstance(x, Tensor):
                self._values[x] = known

    def _choose(self, func: Any, out: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Assume the places in a row of numbers that an operation returns."""
        *_, places = tree_leaves(out)
        taken = {x.name: x.default_value for x in func._schema.arguments}
        taken |= dict(zip(taken, args, strict=False)) | dict(kwargs)
        if "dim" not in taken or places.dtype != torch.int64 or places.numel() > _MOST_ELEMENTS:
            return
        of, dim = args[0], taken["dim"]
        if dim is None or not of.ndim:
            rows, length = (), of.numel()
        else:
            dim %= of.ndim
            rows, length = (*of.shape[:dim], *of.shape[dim + 1 :]), of.shape[dim]
        each = places.numel() // max(prod(rows), 1)
        with no_dispatch():
            known = choose_places(prod(rows), each, length).view(*rows, each)
            known = known.movedim(-1, dim or 0) if places.ndim > len(rows) else known.squeeze(-1)
            self._values[places] = known.reshape(places.shape)
        self.routes = True

    def _without_masks(self, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return indices with places instead of masks, so that the shape of what they select is known."""
        values: list[Tensor | None] = []
        for x in indices:
            if x is not None and x.dtype in (torch.bool, torch.uint8):
                values += self._places(x).unbind(1)
            else:
                values.append(x)
        return values

    def _places(self, mask: Tensor) -> Tensor:
        """Return the places that a mask selects, or as many as it could."""
        if mask not in self._values:
            self.bounds.add("nonzero")
            return _most_places(mask)
        with no_dispatch():
            places = self._values[mask].nonzero()
        out = torch.empty(places.shape, dtype=places.dtype)
        self._values[out] = places
        return out


def choose_places(rows: int, each: int, places: int) -> Tensor:
    """Return the places that rows choose: the first rows choose all of them in turn, the others the first ones."""
    row, column = torch.arange(rows).unsqueeze(1), torch.arange(each).unsqueeze(0)
    return torch.where(row < ceil(places / each), (row * each + column) % places, column.expand(rows, each))


def _makes_whole_numbers(func: Any, args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Return whether an operation without tensors makes whole numbers, few enough to be computed."""
    if "dtype" not in kwargs or kwargs["dtype"] is None or kwargs["dtype"].is_floating_point:
        return False
    sizes = args[0] if args and isinstance(args[0], (list, tuple)) else args[:2]
    return prod(max(int(n), 1) for n in sizes if isinstance(n, int)) <= _MOST_ELEMENTS


def _written(func: Any, args: Sequence[Any]) -> list[Tensor]:
    """Return the tensors that an operation writes to."""
    return [
        x
        for x, taken in zip(args, func._schema.arguments, strict=False)
        if isinstance(x, Tensor) and taken.alias_info is not None and taken.alias_info.is_write
    ]


def _most_places(mask: Tensor) -> Tensor:
    return torch.empty((mask.numel(), mask.ndim), dtype=torch.int64)


def _most_selected(of: Tensor, mask: Tensor) -> Tensor:
    return torch.empty(torch.broadcast_shapes(of.shape, mask.shape).numel(), dtype=of.dtype)


_MOST: Final[Mapping[Any, Callable[..., Any]]] = {
    _ATEN.nonzero: _most_places,
    _ATEN.masked_select: _most_selected,
}
"""Largest results of operations that select by a mask."""
