"""docs/verify.md: its tables name every kind of fault that a diagnosis returns."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from unipar.verification.diagnosis.expert_faults import NEAR_TIE
from unipar.verification.diagnosis.faults import IN_PART

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/verify.md").read_text("utf-8")
CANDIDATES = {"not averaged", "averaged twice", "divided twice by accumulation", "not divided by accumulation"}
"""Kinds that are joined if two of them fit."""


def patterns_of(name: ast.expr) -> Iterator[str]:
    """Yield a pattern for each text that the name of a fault can be; anything fits what is filled in."""
    match name:
        case ast.Constant(value=str(text)):
            yield re.escape(text)
        case ast.Name(id="NEAR_TIE"):
            yield re.escape(NEAR_TIE)
        case ast.JoinedStr(values=parts):
            yield "".join(re.escape(str(part.value)) if isinstance(part, ast.Constant) else ".+" for part in parts)
        case ast.IfExp(body=one, orelse=other):
            yield from patterns_of(one)
            yield from patterns_of(other)
        case _:
            pass


def returned_kinds() -> set[str]:
    """Return a pattern for each kind in the sources of the diagnosis."""
    calls = (
        node
        for file in sorted((ROOT / "unipar/verification/diagnosis").glob("*.py"))
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Fault" and node.args
    )
    return {pattern for call in calls for pattern in patterns_of(call.args[0])} | CANDIDATES | {f".+{IN_PART}"}


def test_the_page_names_every_kind() -> None:
    """In the first column of a table, as code."""
    _, _, section = PAGE.partition("\n## When a strategy disagrees\n")
    rows = [line for line in section.partition("\n## ")[0].splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`([^`]+)`", row.split(" | ")[0])}
    kinds = returned_kinds()
    assert len(kinds) > 40
    assert sorted(kind for kind in kinds if not any(re.fullmatch(kind, name) for name in named)) == []
    assert sorted(name for name in named if not any(re.fullmatch(kind, name) for kind in kinds)) == []
