"""Communication that a library does without torch.distributed: recorded in a separate world after the timed steps."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Final

from unipar.comparison.strategy_world import StrategyWorld
from unipar.errors import Stopped, UniparError
from unipar.memory.account import MemoryAccount

_FIELDS: Final = ("sent", "sent_along", "sent_across", "sent_by")
"""Fields of an account on what a step sends."""


def has_library_traffic(run: StrategyWorld) -> bool:
    """Return whether the strategy's library may send data that torch.distributed does not see."""
    return run.size > 1 and bool(run.backend.capabilities.recording)


def with_library_traffic(run: StrategyWorld, accounts: Sequence[MemoryAccount], threads: str) -> list[MemoryAccount]:
    """Return the accounts with the communication of the library's own records, or with a note if there are none."""
    capabilities = run.backend.capabilities
    try:
        with tempfile.TemporaryDirectory(prefix="unipar-sent-") as folder:
            there = Path(folder) / "run"
            with closing(run.with_environment(there, capabilities.recording)) as again:
                again.start(threads)
                again.record_memory(("placed", "sent"))
                recorded = again.accounts()
    except Stopped:
        raise
    except (UniparError, OSError) as e:
        why = f"its communication is incomplete: {capabilities.records} could not be read ({str(e).splitlines()[0]})"
        return [account.model_copy(update={"notes": (*account.notes, why)}) for account in accounts]
    return [
        account.model_copy(update={field: getattr(more, field) for field in _FIELDS})
        for account, more in zip(accounts, recorded, strict=True)
    ]
