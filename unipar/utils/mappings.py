"""Nested mappings: what is under a key, and dotted keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each value with its dotted key: {"a": {"b": 1}} gives ("a.b", 1). An empty mapping is a value."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def nested_mapping(of: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return the mapping under a key, or an empty one."""
    value = of.get(key)
    return value if isinstance(value, dict) else {}


def value_at(tree: object, key: str) -> Any:
    """Return the value of a dotted key in nested mappings and objects; None if it, or what it is in, is not set."""
    value: Any = tree
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
    return value
