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


ACCOUNT_STRATEGIES: Final = (
    *("native/nothing", "native/optimizer", "native/gradients", "native/parameters"),
    *("deepspeed/nothing", "deepspeed/optimizer", "deepspeed/gradients", "deepspeed/parameters"),
    *("accelerate/nothing", "accelerate/parameters", "accelerate/parameters+zero"),
)

VERIFIED: Final = ("native", "deepspeed", "accelerate")

_SPLIT_STRATEGIES = ("native/parameters", "deepspeed/gradients", "deepspeed/parameters")

HALF_STRATEGIES: Final = {
    "bf16-mixed": ("native/nothing", *_SPLIT_STRATEGIES, "accelerate"),
    "bf16-master": ("native/gradients", *_SPLIT_STRATEGIES, "accelerate/parameters"),  # DDP has no fp32 master
    "fp16": ("native/nothing", *_SPLIT_STRATEGIES, "accelerate"),
}
"""Strategies of each precision in 16 bits."""

_TORCH_ADAM = {"options": {"deepspeed": {"cpu_adam": "torch"}}}  # DeepSpeed's own is compiled for some minutes

OFFLOADED: Final[tuple[tuple[str, str, dict[str, Any]], ...]] = (
    ("native/parameters", "parameters", {}),
    ("deepspeed/gradients", "optimizer", _TORCH_ADAM),
    ("deepspeed/parameters", "parameters", _TORCH_ADAM),
)
"""Strategy, what is kept in the host's memory, and further settings."""

_GPU_MARK = "pytest.mark.gpu"

COMPILED: Final = ("single", "native/nothing", "native/parameters", "deepspeed/gradients", "accelerate")


def all_rows() -> list[Row]:
    """Return every row, in the order in which they start: what is cheap and says most comes first."""
    return [
        Row("packages", "packages", needs_gpu=False, only_gpu=False, limit=180),
        Row("device", "device", limit=90),
        *(Row(f"collectives/{n}", "collectives", ranks=n, limit=90, only_gpu=False) for n in (1, 2)),
        *(Row(f"compare/{n}", "compare", ranks=n, limit=300, alone=True, only_gpu=False) for n in (1, 2)),
        *_verify_rows(),
        *_account_rows(),
        *_training_rows(),
        *(Row(f"tests/{test.split('::')[1]}", "test", {"test": test}, limit=300) for test in marked_tests()),
    ]


def _verify_rows() -> Iterator[Row]:
    for backend in VERIFIED:
        yield Row(f"verify/2/{backend}", "verify", {"strategies": f"{backend}/*"}, 2, limit=300, only_gpu=False)


def _account_rows() -> Iterator[Row]:
    for ranks in (1, 2):
        for strategy in ACCOUNT_STRATEGIES:
            yield Row(f"account/{ranks}/{strategy}", "account", {"strategy": strategy}, ranks, only_gpu=False)


def _training_rows() -> Iterator[Row]:
    for ranks in (1, 2):
        for precision, strategies in HALF_STRATEGIES.items():
            for strategy in strategies:
                given = {"strategy": strategy, "changes": {"train": {"precision": precision}}, "tolerance": 0.02}
                yield Row(f"{precision}/{ranks}/{strategy}", "train", given, ranks, only_gpu=precision == "fp16")
        for strategy, what, more in OFFLOADED:
            given = {"strategy": strategy, "changes": {"model": {"offload": what}, **more}, "tolerance": 1e-4}
            yield Row(f"offload/{ranks}/{strategy}", "train", given, ranks, limit=180)
    for strategy in COMPILED:
        given = {"strategy": strategy, "changes": {"model": {"compile": True}}, "tolerance": 1e-3}
        yield Row(f"compile/1/{strategy}", "train", given, limit=240, only_gpu=False)


def marked_tests(tests: Path = ROOT / "tests") -> list[str]:
    """Return the ids of the test functions that are marked gpu, or whose files are; a parametrized test is one."""
    found: list[str] = []
    for file in sorted(tests.rglob("test_*.py")):
        text = file.read_text("utf-8")
        if _GPU_MARK in text:
            of_file = f"pytestmark = {_GPU_MARK}" in text
            functions = (node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef))
            marked = (f for f in functions if of_file or _GPU_MARK in map(ast.unparse, f.decorator_list))
            name = file.relative_to(tests.parent)
            found += [f"{name}::{f.name}" for f in marked if f.name.startswith("test_")]
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
