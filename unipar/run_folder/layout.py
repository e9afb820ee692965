"""Every path in a run folder, in one place."""

from __future__ import annotations

from pathlib import Path


def heartbeat_path(run: Path, rank: int) -> Path:
    return run / f"rank-{rank}.beat"


def ledger_path(run: Path, rank: int) -> Path:
    return run / f"rank-{rank}.jsonl"


def stdout_path(run: Path) -> Path:
    return run / "rank-0.out"


def error_path(run: Path, rank: int) -> Path:
    return run / f"rank-{rank}.error.json"


def stack_path(run: Path, rank: int) -> Path:
    return run / f"rank-{rank}.stack"


def log_path(run: Path, rank: int) -> Path:
    return run / f"rank-{rank}.log"
