"""What a library sends past torch.distributed: in a world of its own, when nothing is timed any more."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from unipar.comparison.cell_world import CellWorld
from unipar.errors import Stopped, UniparError
from unipar.memory.account import MemoryAccount


def has_library_traffic(run: CellWorld) -> bool:
    """Whether it sends anything that torch.distributed does not see."""
    return run.size > 1 and bool(run.backend.capabilities.recording)


def with_library_traffic(run: CellWorld, accounts: Sequence[MemoryAccount], threads: str) -> list[MemoryAccount]:
    """With what only the library's own records tell; where they cannot be had, with a note."""
    told = run.backend.capabilities
    try:
        with tempfile.TemporaryDirectory(prefix="unipar-sent-") as folder:
            there = Path(folder) / "run"
            with closing(run.with_environment(there, told.recording)) as again:
                again.start(threads)
                again.record_memory(("placed", "sent"))
                found = again.accounts()
    except Stopped:
        raise
    except (UniparError, OSError) as e:
        why = f"what it sends is not whole: {told.records} could not be had ({str(e).splitlines()[0]})"
        return [account.model_copy(update={"notes": (*account.notes, why)}) for account in accounts]
    return [
        account.model_copy(update={"sent": more.sent, "sent_by": more.sent_by})
        for account, more in zip(accounts, found, strict=True)
    ]
