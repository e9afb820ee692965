"""Tensors that pass for others: a tensor as one of a subclass, also where it is of a subclass already."""

from __future__ import annotations

from functools import cache
from typing import Any, TypeVar

from torch import Tensor, nn

_Kind = TypeVar("_Kind", bound=Tensor)


def as_subclass(x: Tensor, kind: type[_Kind]) -> _Kind:
    """Return a tensor of a subclass of torch's, with the memory and the history of `x`.

    torch does it for plain tensors. Others, such as the fake tensors of `unipar plan`, stay what they are as well.
    """
    if type(x) in (Tensor, nn.Parameter):
        return x.as_subclass(kind)
    made: Any = x.view_as(x)
    made.__class__ = _class_of_both(kind, type(x))
    return made


@cache
def _class_of_both(kind: type[Tensor], other: type[Tensor]) -> type[Tensor]:
    return type(kind.__name__, (kind, other), {})
