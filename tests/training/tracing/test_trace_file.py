"""Trace as a file: names, counters, the own time of entries."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from unipar.training.tracing.trace_file import (
    TracedRange,
    TraceEntry,
    complete_trace,
    largest_entries,
    range_name,
    write_trace,
)


def event(name: str, ts: float, dur: float, cat: str = "cpu_op", tid: int = 1, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 7, "tid": tid, "ts": ts, "dur": dur, "args": args}


def annotation(number: int, ts: float, dur: float) -> dict[str, Any]:
    return event(range_name(number), ts, dur, "user_annotation")


def collective(kind: str, size: int) -> TracedRange:
    made = TracedRange()
    made.name_collective(kind, "data", size)
    return made


def completed(events: list[dict[str, Any]], *ranges: TracedRange) -> dict[str, Any]:
    trace = {"traceEvents": events}
    complete_trace(trace, ranges, 3, lambda kind, group: f"{group} of {kind}")
    return trace


def names(trace: dict[str, Any]) -> list[str]:
    return [event["name"] for event in trace["traceEvents"]]


def test_ranges_have_their_names_and_categories_a_counter() -> None:
    """The range on the device has the name too, and no counter of its own."""
    on_device = event(range_name(1), 30.0, 5.0, "gpu_user_annotation", tid=9)
    trace = completed(
        [annotation(0, 0.0, 20.0), annotation(1, 2.0, 9.0), on_device],
        TracedRange("step 4"),
        TracedRange("forward", {"parameters": 64, "unattributed": 8}),
    )
    assert names(trace) == ["step 4", "forward", "forward", "memory of rank 3, bytes"]
    assert trace["traceEvents"][-1] == {
        "ph": "C",
        "name": "memory of rank 3, bytes",
        "pid": 7,
        "ts": 2.0,
        "args": {"parameters": 64, "unattributed": 8},
    }
    assert [event["cat"] for event in trace["traceEvents"][:3]] == ["phase", "phase", "gpu_user_annotation"]


def test_what_is_before_the_first_range_is_left_out() -> None:
    """Ranks wait there for the profilers of others; the names of processes and threads stay."""
    process = {"ph": "M", "name": "process_name", "ts": 0.0, "pid": 7, "tid": 0, "args": {"name": "python"}}
    trace = completed([process, event("gloo:barrier", 1.0, 9.0), annotation(0, 5.0, 2.0)], TracedRange("step 1"))
    assert names(trace) == ["process_name", "step 1"]
    assert trace["traceEvents"][0]["args"] == {"name": "rank 3"}


def test_work_of_gloo_has_the_names_of_the_calls() -> None:
    """By their order; a reduce_scatter is done by an all_reduce, and each collective counts once, by its work."""
    trace = completed(
        [
            annotation(0, 0.0, 1.0),
            annotation(1, 2.0, 1.0),
            event("gloo:all_reduce", 0.5, 6.0, "user_annotation", tid=8),
            event("gloo:all_reduce", 7.0, 3.0, "user_annotation", tid=9),
        ],
        collective("reduce_scatter", 2048),
        collective("all_reduce", 4),
    )
    assert names(trace) == 2 * ["reduce_scatter over data, 2.0 KiB", "all_reduce over data, 4 B"]
    assert trace["traceEvents"][3]["args"] == {"entry": "all_reduce over data", "axis": "data", "bytes": 4}
    assert largest_entries(trace) == (
        "CPU",
        [TraceEntry("reduce_scatter over data", 1, 6e-6), TraceEntry("all_reduce over data", 1, 3e-6)],
    )


def test_work_of_gloo_keeps_its_name_if_it_is_more_than_was_called() -> None:
    """Then nothing tells which work is that of which call."""
    work = [event("gloo:all_reduce", at, 1.0, "user_annotation", tid=8) for at in (1.0, 3.0)]
    trace = completed([annotation(0, 0.0, 1.0), *work], collective("all_reduce", 4))
    assert names(trace) == ["all_reduce over data, 4 B", "gloo:all_reduce", "gloo:all_reduce"]


@pytest.mark.parametrize(
    ("told", "name"),
    [
        ("allreduce", "all_reduce over 0 of all_reduce, 4.0 KiB"),
        ("_allgather_base", "all_gather over 0 of all_gather, 4.0 KiB"),
        ("_reduce_scatter_base", "reduce_scatter over 0 of reduce_scatter, 4.0 KiB"),
        ("all_to_allv", "all_to_all over 0 of all_to_all, 4.0 KiB"),
        ("wait", "record_param_comms"),
    ],
)
def test_collectives_of_nccl_are_named_by_what_torch_tells(told: str, name: str) -> None:
    """The bytes are those of the larger tensor; a kernel keeps its name, and counts as the collective."""
    args: dict[str, Any] = {
        "Collective name": told,
        "In msg nelems": 1024,
        "Out msg nelems": 2048,
        "dtype": "BFloat16",
        "Process Group Name": "0",
    }
    trace = completed(
        [
            annotation(0, 0.0, 9.0),
            event("record_param_comms", 1.0, 1.0, **args),
            event("ncclDevKernel", 2.0, 4.0, "kernel", **args),
        ],
        TracedRange("step 1"),
    )
    assert names(trace) == ["step 1", name, "ncclDevKernel"]
    entry = name.partition(",")[0] if told != "wait" else "ncclDevKernel"
    assert largest_entries(trace) == ("device", [TraceEntry(entry, 1, 4e-6)])


def test_own_time_on_the_cpu() -> None:
    """Without what an operator calls in its thread; phases and dispatch modes are no entries."""
    events = [
        event("forward", 0.0, 100.0, "phase"),
        event("aten::linear", 0.0, 50.0),
        event("PythonDispatchMode", 5.0, 40.0),
        event("aten::mm", 10.0, 30.0),
        event("aten::mm", 60.0, 10.0),
        event("aten::add", 10.0, 5.0, tid=2),
        event("profiler::enter", 200.0, 5.0),
        event("Model.forward", 204.0, 9.0),  # begun in that, and not ended there
        event("aten::mul", 206.0, 6.0),
    ]
    assert largest_entries({"traceEvents": events}) == (
        "CPU",
        [
            TraceEntry("aten::mm", 2, 4e-5),
            TraceEntry("aten::linear", 1, 1e-5),
            TraceEntry("aten::mul", 1, 6e-6),
            TraceEntry("aten::add", 1, 5e-6),
            TraceEntry("profiler::enter", 1, 5e-6),
            TraceEntry("Model.forward", 1, 3e-6),
        ],
    )


def test_ten_entries_at_most() -> None:
    """The largest first."""
    _, entries = largest_entries({"traceEvents": [event(f"op {i:02}", 100.0 * i, i) for i in range(1, 13)]})
    assert [entry.name for entry in entries] == [f"op {i:02}" for i in range(12, 2, -1)]


def test_a_trace_that_is_not_written_completely_is_absent(tmp_path: Path) -> None:
    """Nothing is left of it; one that was there stays."""
    file = tmp_path / "rank-0.json.gz"
    with pytest.raises(TypeError):
        write_trace({"traceEvents": [], "not JSON": object()}, file)
    assert list(tmp_path.iterdir()) == []
    write_trace({"traceEvents": []}, file)
    assert json.loads(gzip.decompress(file.read_bytes())) == {"traceEvents": []}
