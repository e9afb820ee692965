"""JSON of checkpoints, read strictly: limits of size and depth, no key twice, no NaN."""

from __future__ import annotations

import json
import math
from typing import Any

from unipar.errors import CheckpointError
from unipar.utils.text import format_size

_CURLY, _NO_BRACKETS = bytes.maketrans(b"[]", b"{}"), bytes(set(range(256)) - set(b"[]{}"))

_Path = tuple[Any, str | int] | None
"""Path of a value: that of what holds it, and its key or place; spelled only where an error needs it."""


def parse_strict_json(data: bytes, called: str, *, largest: int, deepest: int) -> Any:
    """Return the value of a JSON text; raise CheckpointError, beginning with `called`, unless it is plain and small."""
    if len(data) > largest:
        raise CheckpointError(f"{called}: {format_size(len(data))} of JSON; at most {format_size(largest)} are read")
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
    except RecursionError:
        raise CheckpointError(f"{called}: nested deeper than {deepest} levels") from None
    except ValueError as e:  # also UnicodeDecodeError, and numbers of more than 4,300 digits
        raise CheckpointError(f"{called}: not valid JSON ({_shortened(str(e))})") from None
    if not _is_surely_plain(data, deepest):
        check_json_value(value, called, deepest)
    return value


def _is_surely_plain(data: bytes, deepest: int) -> bool:
    """Return whether a valid JSON text has whole numbers alone, no escapes, and is not too deep; False: perhaps not.

    It spares the large texts of checkpoints a look at every value, which takes longer than to parse them.
    """
    if b"\\" in data:
        return False
    outside = b"".join(data.split(b'"')[::2])  # of texts; without escapes every quote begins or ends one
    numbers = outside.replace(b"true", b"").replace(b"false", b"")
    if any(sign in numbers for sign in (b".", b"e", b"E")):
        return False
    brackets = outside.translate(_CURLY, _NO_BRACKETS)
    for _ in range(deepest):
        brackets = brackets.replace(b"{}", b"")  # the innermost of each
    return not brackets


def dump_strict_json(value: Any, called: str, *, largest: int, deepest: int) -> bytes:
    """Return a value as JSON that `parse_strict_json` reads; raise CheckpointError, beginning with `called`, if not."""
    check_json_value(value, called, deepest)
    data = json.dumps(value, allow_nan=False, ensure_ascii=False, indent=1).encode("utf-8") + b"\n"
    if len(data) > largest:
        raise CheckpointError(f"{called}: {format_size(len(data))} of JSON; at most {format_size(largest)} are written")
    return data


def check_json_value(value: Any, called: str, deepest: int) -> None:
    """Raise CheckpointError unless the value is made of JSON's types, with finite numbers, and not nested too deep."""
    waiting: list[tuple[Any, int, _Path]] = [(value, 0, None)]
    while waiting:
        item, depth, path = waiting.pop()
        if depth > deepest:
            raise CheckpointError(f"{called}: nested deeper than {deepest} levels")
        if isinstance(item, dict):
            for key, inner in item.items():
                if not isinstance(key, str):
                    raise CheckpointError(f"{called}: the key {key!r} at {_spelled(path)} is not a string")
                _check_text(key, called, path)
                waiting.append((inner, depth + 1, (path, key)))
        elif isinstance(item, list | tuple):
            waiting.extend((inner, depth + 1, (path, i)) for i, inner in enumerate(item))
        elif isinstance(item, str):
            _check_text(item, called, path)
        elif isinstance(item, float):
            if not math.isfinite(item):
                raise CheckpointError(f"{called}: {_spelled(path)} is {item}, which JSON has no word for")
        elif item is not None and not isinstance(item, bool | int):
            raise CheckpointError(
                f"{called}: {_spelled(path)} is of type {type(item).__name__}; JSON holds numbers, texts, true, false, "
                "null, lists and objects"
            )


def _spelled(path: _Path) -> str:
    """Return a path as `data.seeds[3]`."""
    steps: list[str] = []
    while path is not None:
        path, step = path
        steps.append(f"[{step}]" if isinstance(step, int) else f".{step}")
    return "".join(reversed(steps)).lstrip(".") or "the top"


def _check_text(text: str, called: str, path: _Path) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise CheckpointError(f"{called}: a text at {_spelled(path)} is not valid Unicode") from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r} stands there twice")
    return made


def _refuse_constant(word: str) -> Any:
    raise ValueError(f"{word} is no JSON")


def _shortened(text: str) -> str:
    return text if len(text) <= 120 else text[:117] + "..."
