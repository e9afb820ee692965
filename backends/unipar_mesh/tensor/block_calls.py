"""Ways in which a block is called: which arguments it is given, of what kind, whatever their sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

CallKind = tuple[Any, ...]
"""Kinds of the arguments by place, then those by name: plain data, equal on all ranks."""


def kind_of_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CallKind:
    """Return what decides the way of a call through a block: arguments that are None, words, switches, dimensions."""
    return tuple(_kind(x) for x in args), tuple((name, _kind(kwargs[name])) for name in sorted(kwargs))


def _kind(x: Any) -> Any:
    if x is None or isinstance(x, bool | str):
        return x
    if isinstance(x, Tensor):  # dimensions of one element are repeated, those of the batch are whatever came
        return "a mask" if x.dtype == torch.bool else "a tensor", x.ndim, *(n == 1 for n in x.shape[1:])
    if isinstance(x, tuple | list):
        return "several", *(_kind(item) for item in x)
    if isinstance(x, dict):
        return "named", *((str(name), _kind(item)) for name, item in x.items())
    return "one of a class", type(x).__qualname__


_ABSENT = "not given"


def describe_difference_of_calls(before: CallKind, now: CallKind) -> str:
    """Return in words which arguments are of another kind than before."""
    one, other = (_by_name(call) for call in (before, now))
    differences = [
        f"{name} is {_in_words(other.get(name, _ABSENT))} and was {_in_words(one.get(name, _ABSENT))}"
        for name in dict.fromkeys((*one, *other))
        if one.get(name, _ABSENT) != other.get(name, _ABSENT)
    ]
    return ", ".join(differences)


def _by_name(call: CallKind) -> dict[str, Any]:
    positional, named = call
    return {f"argument {i + 1}": kind for i, kind in enumerate(positional)} | dict(named)


def _in_words(kind: Any) -> str:
    if not isinstance(kind, tuple):
        return str(kind)
    what, *rest = kind
    match what:
        case "a mask" | "a tensor":
            shape = ", ".join(["n", *("1" if one else "n" for one in rest[1:])][: rest[0]])
            return f"{what} of ({shape})"
        case "several":
            return f"({', '.join(_in_words(item) for item in rest)})"
        case "named":
            return "{" + ", ".join(f"{name}: {_in_words(item)}" for name, item in rest) + "}"
        case _:
            return str(rest[0])
