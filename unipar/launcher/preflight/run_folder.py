"""Run folder before a run: whether the machines share it, may write to it, and whether locks hold between them."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from unipar.distributed.meeting.roll_call import wait_for_key
from unipar.launcher.machines.folders import MARK_PREFIX, is_mark_seen

if TYPE_CHECKING:
    import torch.distributed as dist

_SECONDS_FOR_MARK = 60.0


@dataclass(frozen=True)
class FolderFacts:
    """Run folder as one machine sees it."""

    out: str
    """Its path here, absolute."""

    base: str
    """The part of it that is there already."""

    free: int
    """Bytes free there."""

    writable: bool
    shared: bool = True
    """Whether it is the folder of rank 0's machine."""

    lacks: str = ""
    """The part that rank 0's machine has, if it is not there on this one."""

    lock: Literal["", "holds", "does not hold"] = ""
    """Whether a lock that rank 0's machine holds is seen here; empty: not tried."""

    why_no_lock: str = ""
    """Error of the file system, if it has no locks."""


@contextmanager
def look_at_folder(store: dist.Store, index: int, out: Path, wanted: str) -> Generator[FolderFacts]:
    """Context manager: what this machine sees of the run folder; all machines enter before one leaves.

    The first machine leaves a file with a random name in the folder, or where it would be made, and locks it.
    """
    out = out.resolve()
    base = next(path for path in (out, *out.parents) if path.is_dir())
    facts = FolderFacts(str(out), str(base), shutil.disk_usage(base).free, os.access(base, os.W_OK | os.X_OK))
    if index:
        yield _compared(store, facts, wanted)
        return
    mark, locked, why = base / f"{MARK_PREFIX}{secrets.token_hex(8)}", -1, ""
    try:
        if facts.writable:
            try:
                locked = os.open(mark, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
                fcntl.flock(locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as e:
                why = e.strerror or str(e)
        store.set("mark", json.dumps({"base": str(base), "name": mark.name if locked >= 0 else "", "why": why}))
        writable = facts.writable and locked >= 0
        yield FolderFacts(facts.out, facts.base, facts.free, writable, why_no_lock=why)
    finally:
        if locked >= 0:
            os.close(locked)
            mark.unlink(missing_ok=True)


def _compared(store: dist.Store, facts: FolderFacts, wanted: str) -> FolderFacts:
    late = f"waited {_SECONDS_FOR_MARK:g} s for rank 0's machine to look at its run folder"
    record = json.loads(wait_for_key(store, "mark", time.monotonic() + _SECONDS_FOR_MARK, late))
    base = Path(record["base"])
    mark = base / record["name"]
    shared = bool(record["name"]) and wanted != "own" and is_mark_seen(mark, wanted)
    lacks = "" if base.is_dir() else str(base)
    lock, why = _tried_lock(mark) if shared and not record["why"] else ("", "")
    return FolderFacts(facts.out, facts.base, facts.free, facts.writable, shared, lacks, lock, why)


def _tried_lock(mark: Path) -> tuple[Literal["", "holds", "does not hold"], str]:
    try:
        with mark.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return "holds", ""
    except OSError as e:
        return "", e.strerror or str(e)
    return "does not hold", ""
