"""Torch functions as a trial and an execution see them: names, numbers that are sizes, arguments that pair up."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

DROPOUTS = {"dropout", "dropout_"}
LITERALS = {"view", "reshape", "expand", "broadcast_to", "unflatten"}
"""Functions that are given the sizes of their result."""

RANDOM = {
    "alpha_dropout",
    "bernoulli",
    "bernoulli_",
    "cauchy_",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "exponential_",
    "feature_alpha_dropout",
    "feature_dropout",
    "geometric_",
    "gumbel_softmax",
    "log_normal_",
    "multinomial",
    "normal_",
    "poisson",
    "rand_like",
    "randint_like",
    "randn_like",
    "random_",
    "rrelu",
    "uniform_",
}
SIZES = {"size", "shape", "numel", "nelement", "__len__"}
"""Functions and attributes that tell sizes."""

SPLITS = {"split", "split_with_sizes", "chunk", "unsafe_chunk", "tensor_split", "narrow", "__getitem__"}

VIEWS = {"view", "reshape", "flatten", "unflatten", "view_as", "reshape_as"}
"""Functions that may put dimensions together."""

PRODUCTS = {"linear", "matmul", "__matmul__"}
"""Functions that multiply rows by a matrix."""

_PRODUCTS = {"matmul", "bmm", "baddbmm"}
_PAIRS = {
    *("add", "sub", "subtract", "rsub", "mul", "multiply", "div", "divide", "truediv", "true_divide", "floordiv"),
    *("pow", "rpow", "maximum", "minimum", "fmax", "fmin", "where", "masked_fill", "lerp", "addcmul", "addcdiv"),
    *("eq", "ne", "lt", "le", "gt", "ge", "and", "or", "xor", "logical_and", "logical_or", "logical_xor"),
    *("atan2", "remainder", "fmod", "mod", "copysign", "clamp", "hypot", "bitwise_and", "bitwise_or", "prelu"),
}  # fmt: skip
"""Functions that pair the elements of their arguments, by broadcasting."""

_ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
_ATTENTION_DEFAULTS = (None, None, None, None, 0.0, False, None, False)


def name_of_call(func: Any) -> str:
    """Return the name of a function as the user wrote it; that of the attribute for one that is read."""
    name = getattr(func, "__name__", "")
    return getattr(func.__self__, "__name__", name) if name == "__get__" else name


def base_name(name: str) -> str:
    """Return the name of the function of which this is the operator, or the one in place."""
    if name.startswith("__") and name.endswith("__"):
        bare = name[2:-2]
        return bare[1:] if bare[0] in "ri" and bare[1:] in _PAIRS | _PRODUCTS else bare
    return name.rstrip("_")


def bound_arguments(args: Any, kwargs: Any) -> dict[str, Any]:
    """Return the arguments of `scaled_dot_product_attention` by name."""
    bound = dict(zip(_ATTENTION, _ATTENTION_DEFAULTS, strict=True))
    bound.update(zip(_ATTENTION, args, strict=False))
    return bound | dict(kwargs)


def numbers_of(name: str, args: Any, kwargs: Any) -> tuple[list[int], bool] | None:
    """Return the sizes that a call is given, and whether each is an argument by itself; None if it is given none."""
    rest = args[1:]
    if name == "unflatten":
        sizes = kwargs.get("sizes", args[2] if len(args) > 2 else None)
        return None if sizes is None else (list(sizes), False)
    for key in ("size", "shape"):
        if key in kwargs:
            return list(kwargs[key]), False
    if rest and isinstance(rest[0], tuple | list):
        return list(rest[0]), False
    return (list(rest), True) if rest and all(isinstance(n, int) for n in rest) else None


def with_numbers(name: str, args: Any, kwargs: Any, numbers: list[int]) -> tuple[Any, Any]:
    """Return the arguments of a call with other sizes."""
    if name == "unflatten":
        if "sizes" in kwargs:
            return args, {**kwargs, "sizes": tuple(numbers)}
        return (*args[:2], tuple(numbers), *args[3:]), kwargs
    for key in ("size", "shape"):
        if key in kwargs:
            return args, {**kwargs, key: tuple(numbers)}
    if isinstance(args[1], tuple | list):
        return (args[0], tuple(numbers), *args[2:]), kwargs
    return (args[0], *numbers), kwargs


def place_of_number(name: str, args: Any, kwargs: Any, dim: int, ndim: int) -> int | None:
    """Return which of a call's sizes is that of dimension `dim` of the result; None if no number is given for it."""
    parsed = numbers_of(name, args, kwargs)
    if parsed is None:
        return None
    numbers, _ = parsed
    first = 0
    if name == "unflatten":
        at = kwargs.get("dim", args[1] if len(args) > 1 else 0)
        first = at if at >= 0 else at + ndim - len(numbers) + 1
    place = dim - first
    return place if 0 <= place < len(numbers) and numbers[place] != -1 else None


def part_dimension(name: str, way: tuple[Any, ...], value: Tensor, cut: DTensor, dim: int) -> int | None:
    """Return the dimension of a whole argument that pairs with the cut one of another; None if it has none."""
    base, right = base_name(name), dim - cut.ndim
    if base in ("cat", "concat", "stack"):
        return dim if value.ndim == cut.ndim and value.shape[dim] == cut.shape[dim] else None
    if base in _PRODUCTS and right > -3:
        return None
    if base not in _PAIRS | _PRODUCTS or value.ndim < -right:
        return None
    return value.ndim + right if value.shape[right] == cut.shape[right] and value.shape[right] > 1 else None


def pieces_along(name: str, args: Any, kwargs: Any, ndim: int, dim: int, width: int) -> list[tuple[int, int]] | None:
    """Return (start, stop) of what a call takes along dimension `dim`; None if it leaves that dimension alone."""
    rest = list(args[1:])

    def argument(place: int, *keys: str, default: Any = None) -> Any:
        return next((kwargs[k] for k in keys if k in kwargs), rest[place] if len(rest) > place else default)

    if name == "__getitem__":
        return _pieces_of_index(rest[0], ndim, dim, width)
    if name == "narrow":
        along, start, length = argument(0, "dim"), argument(1, "start"), argument(2, "length")
        return [(start, start + length)] if along % ndim == dim else None
    if argument(1, "dim", "axis", default=0) % ndim != dim:
        return None
    if name in ("split", "split_with_sizes"):
        sizes: Any = argument(0, "split_size", "split_size_or_sections", "split_sizes")
        if isinstance(sizes, int):
            sizes = [min(sizes, width - at) for at in range(0, width, sizes)]
        stops = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    elif name == "tensor_split" and not isinstance(argument(0, "indices_or_sections", "sections", "indices"), int):
        stops = [*argument(0, "indices_or_sections", "indices"), width]
    else:
        count = argument(0, "chunks", "indices_or_sections", "sections")
        step = -(-width // count)
        stops = [min(width, step * (i + 1)) for i in range(count)]
    return list(zip([0, *stops[:-1]], stops, strict=True))


def _pieces_of_index(index: Any, ndim: int, dim: int, width: int) -> list[tuple[int, int]] | None:
    place = place_in_index(index, ndim, dim)
    item = None if place is None else (index if isinstance(index, tuple) else (index,))[place]
    if item is None or item == slice(None):
        return None
    if not isinstance(item, slice) or item.step not in (None, 1):
        raise ValueError("an index takes single elements along the cut")
    start, stop, _ = item.indices(width)
    return None if (start, stop) == (0, width) else [(start, stop)]


def place_in_index(index: Any, ndim: int, dim: int) -> int | None:
    """Return which item of an index is for dimension `dim`; None if none is, or the index holds tensors."""
    items = index if isinstance(index, tuple) else (index,)
    if any(isinstance(i, Tensor | list | bool) for i in items):
        return None
    used = len([i for i in items if i is not None and i is not Ellipsis])
    at = 0
    for place, item in enumerate(items):
        if item is None:
            continue
        step = ndim - used if item is Ellipsis else 1
        if at <= dim < at + step:
            return None if item is Ellipsis else place
        at += step
    return None


def is_cut_elsewhere(y: Any, length: int, viewed: DTensor | None) -> bool:
    """Return whether this is not cut along a whole sequence; `viewed`: of which it is a view."""
    if not isinstance(y, DTensor):
        return False
    placement: Any = y.placements[0]
    dim = placement.dim % y.ndim
    if getattr(placement, "split_factor", 1) != 1 or y.shape[dim] != length:
        return True
    if viewed is None:
        return False
    before: Any = viewed.placements[0]
    return tuple(y.shape[:dim]) != tuple(viewed.shape[: before.dim % viewed.ndim])
