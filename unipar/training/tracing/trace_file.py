"""Trace of a rank as a file for Perfetto: names of ranges and collectives, counters of memory, largest entries."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, NamedTuple

from unipar.memory.recording.bytes_sent_recorder import collective_of
from unipar.utils.files import whole
from unipar.utils.text import format_size

LARGEST_ENTRIES: Final = 10
"""Number of entries that are listed as text."""

_PREFIX: Final = "unipar range "
_RANGE: Final = "user_annotation"
_PHASE: Final = "phase"
"""Category of ranges that are no work by themselves; their time is that of what runs in them."""

_ON_DEVICE: Final = ("kernel", "gpu_memcpy", "gpu_memset")
_ON_CPU: Final = ("cpu_op", _RANGE)
_CALLS: Final = ("c10d::", "_c10d_functional::", "_c10d_functional_autograd::")
"""Beginnings of operators that only start a collective, whose time belongs to the collective."""

_CALL_OF_TORCH: Final = "record_param_comms"
"""Name of an event with which torch itself tells the group and the elements of a collective of NCCL."""

_WORK_OF_GLOO: Final = "gloo:"
_BY_ANOTHER: Final = {"reduce_scatter": "all_reduce"}
"""Collectives that gloo does by another one, where it has none for them."""

_MODE: Final = "PythonDispatchMode"
"""Name of the time that an operator spends in a dispatch mode, as that which names collectives."""

_ROUNDING: Final = 0.01
"""Microseconds by which a call may seem to end after the one that it is in: a time has 13 digits before the point."""

_ELEMENT_BYTES: Final = {
    **dict.fromkeys(("Byte", "Char", "Bool", "Float8_e4m3fn", "Float8_e5m2"), 1),
    **dict.fromkeys(("Short", "Half", "BFloat16"), 2),
    **dict.fromkeys(("Int", "Float"), 4),
    **dict.fromkeys(("Long", "Double", "ComplexFloat"), 8),
}


AxisOfGroup = Callable[[str, str], str | None]
"""Function that returns the axis of the mesh of a collective, by its kind and the name of its group."""


@dataclass
class TracedRange:
    """Range of a trace that unipar has recorded: a step, a phase, a part of a phase, or a collective."""

    name: str = ""
    held: Mapping[str, int] = field(default_factory=dict)
    """Bytes by category of memory as the range begins; empty if they were not counted."""

    kind: str = ""
    """Collective; "" if it is none."""

    args: Mapping[str, Any] = field(default_factory=dict)

    def name_collective(self, kind: str, axis: str | None, size: int) -> None:
        """Make this the range of a collective of `size` bytes along an axis; None: in a group of one rank."""
        where = f"{kind} over {axis}" if axis is not None else f"{kind} in a group of one rank"
        self.name, self.kind = f"{where}, {format_size(size)}", kind
        self.args = {"entry": where, "axis": axis or "", "bytes": size}


class TraceEntry(NamedTuple):
    """Entry of a trace: all events of one name."""

    name: str
    calls: int
    seconds: float
    """Time in these events themselves, without what they have called."""


def range_name(number: int) -> str:
    """Return the name of a range while it is recorded; the file gives it that of the `TracedRange`."""
    return f"{_PREFIX}{number}"


def complete_trace(trace: dict[str, Any], ranges: Sequence[TracedRange], rank: int, axis_of: AxisOfGroup) -> None:
    """Give the events of a trace, as torch writes it, the names of ranges and collectives; add counters of memory.

    Events before the first range are left out: the ranks wait there until all profilers have started.
    """
    events: list[dict[str, Any]] = trace["traceEvents"]
    counters: list[dict[str, Any]] = []
    calls: dict[str, list[tuple[dict[str, Any], TracedRange]]] = {}
    begin = float("inf")
    for event in events:
        name, args = str(event.get("name", "")), event.get("args", {})
        if name.startswith(_PREFIX):
            own = ranges[int(name.removeprefix(_PREFIX))]
            begin = min(begin, event["ts"])
            event["name"], event["args"] = own.name, {**args, **own.args}
            if event.get("cat") != _RANGE:  # its picture in the time of the device
                continue
            if own.held:
                at = {key: event[key] for key in ("pid", "ts")}
                counters.append({"ph": "C", "name": f"memory of rank {rank}, bytes", **at, "args": dict(own.held)})
            if own.kind:
                calls.setdefault(own.kind, []).append((event, own))
            else:
                event["cat"] = _PHASE
        elif "Collective name" in args and (own := _told_by_torch(args, axis_of)) is not None:
            event["name"] = own.name if name == _CALL_OF_TORCH else name  # kernels keep theirs
            event["args"] = {**args, **own.args}
        elif event.get("ph") == "M" and name == "process_name" and args.get("name") == "python":
            args["name"] = f"rank {rank}"
    _name_work_of_gloo(events, calls)
    trace["traceEvents"] = [e for e in events if e.get("ph") == "M" or e.get("ts", begin) >= begin] + counters


def _told_by_torch(args: Mapping[str, Any], axis_of: AxisOfGroup) -> TracedRange | None:
    """Return the range of a collective by what torch tells of it; None if it sends nothing, as a wait."""
    kind = collective_of(f"c10d::{args['Collective name']}")
    if kind is None:
        return None
    elements = max(int(args.get("In msg nelems", 0)), int(args.get("Out msg nelems", 0)))
    own = TracedRange()
    axis = axis_of(kind, str(args.get("Process Group Name", "")))
    own.name_collective(kind, axis, elements * _ELEMENT_BYTES.get(str(args.get("dtype")), 0))
    return own


def _name_work_of_gloo(
    events: Iterable[dict[str, Any]], calls: Mapping[str, Sequence[tuple[dict[str, Any], TracedRange]]]
) -> None:
    """Name the work of gloo's threads by the calls that started it, in their order; not if their numbers differ."""
    work: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        if str(event.get("name", "")).startswith(_WORK_OF_GLOO):
            work.setdefault(event["name"].removeprefix(_WORK_OF_GLOO), []).append(event)
    by_work: dict[str, list[tuple[dict[str, Any], TracedRange]]] = {}
    for kind, of_kind in calls.items():
        by_work.setdefault(kind if kind in work else _BY_ANOTHER.get(kind, kind), []).extend(of_kind)
    for kind, of_kind in by_work.items():
        started = sorted(work.get(kind, ()), key=itemgetter("ts"))
        if len(started) == len(of_kind):
            for event, (call, own) in zip(started, sorted(of_kind, key=lambda call: call[0]["ts"]), strict=True):
                event["name"], event["args"] = own.name, {**event.get("args", {}), **own.args}
                call["cat"] = _PHASE  # else the collective would count twice


def largest_entries(trace: Mapping[str, Any]) -> tuple[str, list[TraceEntry]]:
    """Return where time was counted, `device` or `CPU`, and the entries of most time of their own there."""
    complete: list[dict[str, Any]] = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    kernels = [(_entry(event), event["dur"]) for event in complete if event.get("cat") in _ON_DEVICE]
    times: dict[str, list[float]] = {}
    for name, micros in kernels or _times_on_cpu(complete):
        times.setdefault(name, []).append(micros / 1e6)
    entries = [TraceEntry(name, len(each), sum(each)) for name, each in times.items()]
    return "device" if kernels else "CPU", sorted(entries, key=lambda e: (-e.seconds, e.name))[:LARGEST_ENTRIES]


def _entry(event: Mapping[str, Any]) -> str:
    """Return the name under which an event counts: collectives of all sizes along an axis are one entry."""
    return str(event.get("args", {}).get("entry", event["name"]))


def _times_on_cpu(events: Iterable[dict[str, Any]]) -> list[tuple[str, float]]:
    """Return name and own microseconds of each operator: without those that it has called in the same thread."""
    threads: dict[tuple[Any, Any], list[dict[str, Any]]] = {}
    for event in events:
        if event.get("cat") in _ON_CPU and not str(event["name"]).startswith(_CALLS):
            threads.setdefault((event["pid"], event["tid"]), []).append(event)
    found: list[tuple[str, float]] = []
    for thread in threads.values():
        calls: list[tuple[float, int]] = []
        """End, and place in `found`, of each call that is open."""

        for event in sorted(thread, key=lambda e: (e["ts"], -e["dur"])):
            end = event["ts"] + event["dur"]
            while calls and calls[-1][0] + _ROUNDING < end:  # it has ended, or has only begun this range
                calls.pop()
            if calls:
                name, micros = found[calls[-1][1]]
                found[calls[-1][1]] = name, micros - event["dur"]
            calls.append((end, len(found)))
            found.append((_entry(event), event["dur"]))
    return [(name, max(0.0, micros)) for name, micros in found if name != _MODE]


def write_trace(trace: Mapping[str, Any], file: Path) -> None:
    """Write a trace: completely, or not at all."""
    with whole(file) as partial, gzip.open(partial, "wt", compresslevel=5, encoding="utf-8") as stream:
        json.dump(trace, stream)
