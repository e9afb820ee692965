"""Numbers of Python that an optimizer keeps for a parameter, beside tensors: in and out of pieces of state."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from unipar.backend.engine import KIND_OF_AVERAGES

_DTYPES: dict[type, torch.dtype] = {int: torch.int64, float: torch.float64, bool: torch.bool, type(None): torch.uint8}
_WORDS = {"int": int, "float": float, "bool": bool, "none": type(None)}
_TYPES = {kind: word for word, kind in _WORDS.items()}


def encode_plain(key: str, value: Any) -> tuple[str, Tensor] | None:
    """Return the kind of the piece for a number, and the number as a tensor; None for any other value."""
    word = _TYPES.get(type(value))
    if word is None or (word == "int" and not -(2**63) <= value < 2**63):
        return None
    return f"{word} {key}", torch.tensor(value or 0, dtype=_DTYPES[type(value)])


KINDS_OF_MODEL: Final = frozenset({"weight", "buffer", "task", "stream", KIND_OF_AVERAGES})
"""Kinds of pieces that are not an optimizer's: a tensor of its state that is called so could not be told from them."""


def describe_unsaved_value(key: str, name: str, value: Any) -> str:
    """Return the sentence about a value of an optimizer that a checkpoint cannot hold."""
    if isinstance(value, Tensor):
        return describe_reserved_key(key, name)
    shown = f"the number {value}" if isinstance(value, int) else f"a {type(value).__name__}"
    return (
        f"the optimizer keeps {key!r} of {name} as {shown}: a checkpoint holds tensors, and Python's int (of 64 bits), "
        "float, bool and None; keep it as one of these"
    )


def describe_reserved_key(key: str, name: str) -> str:
    """Return the sentence about a tensor of an optimizer whose key means something else in a checkpoint."""
    return (
        f"the optimizer keeps a tensor of {name} as {key!r}, and a checkpoint calls something else so: keep it "
        "under another key"
    )


def plain_key(kind: str) -> str | None:
    """Return the optimizer's key of a number, from the kind of its piece; None if the piece is a tensor's."""
    word, space, key = kind.partition(" ")
    return key if space and word in _WORDS else None


def decode_plain(kind: str, saved: Tensor) -> Any:
    """Return a number as it was."""
    wanted = _WORDS[kind.partition(" ")[0]]
    return None if wanted is type(None) else wanted(saved.item())
