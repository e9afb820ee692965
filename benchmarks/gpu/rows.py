"""Rows of the table of `make gpu`, as data: what each runs, on how many ranks, and for how long at most."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]


@dataclass(frozen=True)
class Row:
    """One row: a process of its own, which calls `kind` of benchmarks/gpu/row.py with `arguments`."""

    name: str
    kind: str
    arguments: dict[str, Any] = field(default_factory=dict[str, Any])
    ranks: int = 1
    limit: int = 120
    """Seconds after which the row is stopped."""

    alone: bool = False
    """Whether no other row may run beside it, because it measures time."""

    needs_gpu: bool = True
    """False: it runs on any machine."""

    only_gpu: bool = True
    """Whether it cannot run with `--device cpu`."""


LEDGER_CELLS: Final = (
    *("native/nothing", "native/optimizer", "native/gradients", "native/parameters"),
    *("deepspeed/nothing", "deepspeed/optimizer", "deepspeed/gradients", "deepspeed/parameters"),
    *("accelerate/nothing", "accelerate/parameters", "accelerate/parameters+zero"),
)

VERIFIED: Final = ("native", "deepspeed", "accelerate")

HALF_CELLS: Final = ("native/nothing", "native/parameters", "deepspeed/gradients", "deepspeed/parameters", "accelerate")

_TORCH_ADAM = {"options": {"deepspeed": {"cpu_adam": "torch"}}}  # DeepSpeed's own is compiled for some minutes

OFFLOADED: Final[tuple[tuple[str, str, dict[str, Any]], ...]] = (
    ("native/parameters", "parameters", {}),
    ("deepspeed/gradients", "optimizer", _TORCH_ADAM),
    ("deepspeed/parameters", "parameters", _TORCH_ADAM),
)
"""Cell, what is kept in the host's memory, and further settings."""

COMPILED: Final = ("single", "native/nothing", "native/parameters", "deepspeed/gradients", "accelerate")


def all_rows() -> list[Row]:
    """Return every row, in the order in which they start: what is cheap and says most comes first."""
    return [
        Row("packages", "packages", needs_gpu=False, only_gpu=False, limit=180),
        Row("device", "device", limit=90),
        *(Row(f"collectives/{n}", "collectives", ranks=n, limit=90, only_gpu=False) for n in (1, 2)),
        *(Row(f"compare/{n}", "compare", ranks=n, limit=300, alone=True, only_gpu=False) for n in (1, 2)),
        *_verify_rows(),
        *_ledger_rows(),
        *_training_rows(),
        *(Row(f"tests/{test.split('::')[1]}", "test", {"test": test}, limit=300) for test in marked_tests()),
    ]


def _verify_rows() -> Iterator[Row]:
    for backend in VERIFIED:
        yield Row(f"verify/2/{backend}", "verify", {"cells": f"{backend}/*"}, 2, limit=300, only_gpu=False)


def _ledger_rows() -> Iterator[Row]:
    for ranks in (1, 2):
        for cell in LEDGER_CELLS:
            yield Row(f"ledger/{ranks}/{cell}", "ledger", {"cell": cell}, ranks, only_gpu=False)


def _training_rows() -> Iterator[Row]:
    for ranks in (1, 2):
        for precision in ("bf16-mixed", "bf16-master", "fp16"):
            for cell in HALF_CELLS:
                given = {"cell": cell, "changes": {"train": {"precision": precision}}, "tolerance": 0.02}
                yield Row(f"{precision}/{ranks}/{cell}", "train", given, ranks, only_gpu=precision == "fp16")
        for cell, what, more in OFFLOADED:
            given = {"cell": cell, "changes": {"model": {"offload": what}, **more}, "tolerance": 1e-4}
            yield Row(f"offload/{ranks}/{cell}", "train", given, ranks, limit=180)
    for cell in COMPILED:
        given = {"cell": cell, "changes": {"model": {"compile": True}}, "tolerance": 1e-3}
        yield Row(f"compile/1/{cell}", "train", given, limit=240, only_gpu=False)


def marked_tests(tests: Path = ROOT / "tests") -> list[str]:
    """Return the ids of the test functions in files that are marked gpu; a parametrized test is one."""
    found: list[str] = []
    for file in sorted(tests.rglob("test_*.py")):
        text = file.read_text("utf-8")
        if "pytestmark = pytest.mark.gpu" in text:
            functions = (node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef))
            name = file.relative_to(tests.parent)
            found += [f"{name}::{f.name}" for f in functions if f.name.startswith("test_")]
    return found


def select_rows(rows: Sequence[Row], patterns: Iterable[str]) -> list[Row]:
    """Return the rows that a pattern names: itself (`*` and `?` as in a shell), or the beginning before a slash."""
    wanted = [pattern for word in patterns for pattern in word.split(",") if pattern]
    if not wanted:
        return list(rows)
    unknown = [pattern for pattern in wanted if not any(_fits(row, pattern) for row in rows)]
    if unknown:
        kinds = sorted({row.name.split("/")[0] for row in rows})
        raise ValueError(f"no row is called {', '.join(unknown)}; rows begin with {', '.join(kinds)}")
    return [row for row in rows if any(_fits(row, pattern) for pattern in wanted)]


def _fits(row: Row, pattern: str) -> bool:
    return fnmatchcase(row.name, pattern) or row.name.startswith(f"{pattern.rstrip('/')}/")
