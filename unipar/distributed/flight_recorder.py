"""Collectives that a rank has begun and not finished, as torch's flight recorder knows them."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typing_extensions import override

from unipar.utils.files import write_file_atomically


@dataclass(frozen=True)
class PendingCollective:
    """Collective of torch.distributed that a rank waits for."""

    name: str
    """What it is called in torch.distributed, or for a pair of ranks its direction: "all_reduce", "recv 0<-1"."""

    shapes: tuple[str, ...]
    """Its inputs, such as "float [3, 5]"."""

    group: str
    number: int
    """Position among its group's collectives, from 1; 0 for what is sent between two ranks."""

    @override
    def __str__(self) -> str:
        first = f" of {self.shapes[0]}" if self.shapes else ""
        more = f" and {len(self.shapes) - 1} more" if len(self.shapes) > 1 else ""
        place = f"collective {self.number} of group {self.group}" if self.number else f"group {self.group}"
        return f"{self.name}{first}{more} ({place})"


@dataclass(frozen=True)
class CollectiveRecord:
    """Collectives of one rank, from its flight recorder."""

    pending: PendingCollective | None
    """The oldest collective that has not ended."""

    begun: Mapping[str, int]
    """Number of collectives that this rank has begun, by group."""


def record_on_signal(number: signal.Signals, path: Path) -> None:
    """Write what torch's flight recorder knows to this path whenever this process gets the signal.

    A thread writes it, since the main thread may wait in a library. The signal's handler does nothing, so that
    faulthandler can be registered for the signal as well, with `chain=True`.
    """
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    os.set_blocking(reader, True)
    signal.signal(number, _ignore)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def write_each_time() -> None:
        while received := os.read(reader, 1):
            if received[0] == number and (record := _flight_record()):
                write_file_atomically(path, record)

    threading.Thread(target=write_each_time, name="unipar-collectives", daemon=True).start()


def _ignore(*_: object) -> None:
    pass


def _flight_record() -> str:
    """Return the flight recorder's JSON; empty without torch.distributed, or in a torch that does not tell it."""
    if "torch.distributed" not in sys.modules:
        return ""
    from torch._C import _distributed_c10d as c10d

    dump: Any = getattr(c10d, "_dump_fr_trace_json", None)
    record = dump() if dump is not None else ""
    return record.decode("utf-8") if isinstance(record, bytes) else record


def read_collectives(path: Path) -> CollectiveRecord | None:
    """Return the record in a file that `record_on_signal` wrote, or None if there is none."""
    try:
        record: dict[str, Any] = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return None
    begun: dict[str, int] = {}
    pending: PendingCollective | None = None
    for entry in record.get("entries", []):
        group, number = _group_name(*entry["process_group"]), 0 if entry["is_p2p"] else entry["collective_seq_id"]
        begun[group] = max(begun.get(group, 0), number)
        if pending is None and not entry["retired"] and entry["state"] != "completed":
            shapes = [
                f"{dtype.lower()} {size}"
                for dtype, size in zip(entry["input_dtypes"], entry["input_sizes"], strict=False)
            ]
            pending = PendingCollective(entry["profiling_name"].partition(":")[2], tuple(shapes), group, number)
    return CollectiveRecord(pending, begun)


def _group_name(identity: str, description: str) -> str:
    return identity if description in ("", "undefined") else description
