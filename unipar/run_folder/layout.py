"""Every path in a run folder, in one place."""

from __future__ import annotations

from pathlib import Path


def beat_of(run: Path, rank: int) -> Path:
    return run / f"rank-{rank}.beat"


def ledger_of(run: Path, rank: int) -> Path:
    return run / f"rank-{rank}.jsonl"


def prints_of(run: Path) -> Path:
    return run / "rank-0.out"


def error_of(run: Path, rank: int) -> Path:
    return run / f"rank-{rank}.error.json"


def stack_of(run: Path, rank: int) -> Path:
    return run / f"rank-{rank}.stack"


def log_of(run: Path, rank: int) -> Path:
    return run / f"rank-{rank}.log"
