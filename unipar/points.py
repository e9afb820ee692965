"""Entry points: how what a config names is found, ours like anyone's."""

from __future__ import annotations

import difflib
from importlib.metadata import entry_points
from typing import Any

from unipar.errors import UniparError


def names(group: str) -> list[str]:
    return sorted({point.name for point in entry_points(group=group)})


def loaded(group: str, noun: str, name: str, error: type[UniparError]) -> tuple[str, Any]:
    """Where the one entry point of that name leads, and what is there; `error` for none or several."""
    found = {point.value: point for point in entry_points(group=group, name=name)}
    if not found:
        known = names(group)
        near = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise error(f"no {noun} {name!r}; {hint}known: {', '.join(known)}")
    if len(found) > 1:
        raise error(
            f"{len(found)} packages offer a {noun} {name!r} ({', '.join(sorted(found))}); uninstall all but one"
        )
    ((value, point),) = found.items()
    return value, point.load()
