"""CUDA's memory from torch's history of it. No recording: entries as torch 2.13's source writes them down, by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from unipar.backend import Category
from unipar.memory.account import DeviceMemory, MemoryAccount, NamedBlock, PhaseName, PhasePeak, ResidentMemory
from unipar.memory.recording.attribution import Attribution
from unipar.memory.recording.watcher import choose_event_sources
from unipar.memory.sources.allocator_history import (
    AllocatorHistory,
    SizeSnapshot,
    allocated_block_sizes,
    allocation_entries,
    events_from_trace,
    largest_drift,
)
from unipar.memory.sources.events import NamedStorage, PhaseMark, PoolPeaks, RankEvents
from unipar.memory.sources.malloc_build import why_no_history
from unipar.memory.sources.nvml import bytes_of_process, query_bytes_used
from unipar.memory.sources.pinned import pinned_phase
from unipar.memory.sources.profiler import ProfilerSource

MIB = 2**20
WEIGHT, GRAD, SAVED, SCRATCH, HIDDEN, OLD = (0x7F0000000000 + i * 64 * MIB for i in range(6))
SIDE = 94_000_000_000_000
"""A stream is told by where its handle lies; the default one is 0."""

TASK = {"filename": "/home/me/task.py", "name": "loss", "line": 7}
TORCH = {"filename": f"{torch.__path__[0]}/nn/modules/linear.py", "name": "forward", "line": 134}
GATHER = {"filename": "/x/fsdp/_fsdp_collectives.py", "name": "foreach_all_gather", "line": 270}


def entry(action: str, addr: int, size: int, *frames: dict[str, Any], stream: int = 0) -> dict[str, Any]:
    """One of `torch.cuda.memory._snapshot()["device_traces"][0]`, the innermost frame first."""
    return {
        "action": action,
        "addr": addr,
        "size": size,
        "stream": stream,
        "time_us": 1_790_000_000_000_000,
        "compile_context": "N/A",
        "user_metadata": "",
        "pool_id": (0, 0),
        "frames": list(frames),
    }


def alloc(addr: int, size: int, *frames: dict[str, Any], stream: int = 0) -> dict[str, Any]:
    return entry("alloc", addr, size, *frames, stream=stream)


def free(addr: int, size: int, stream: int = 0) -> list[dict[str, Any]]:
    """Asked for, and done at once, as no other stream uses it."""
    return [entry("free_requested", addr, size, stream=stream), entry("free_completed", addr, size, stream=stream)]


STEP = (
    entry("segment_alloc", WEIGHT, 20 * MIB),
    alloc(WEIGHT, 4_000_000),
    alloc(HIDDEN, 5_000_000),
    entry("snapshot", 0, 0),
    alloc(SAVED, 2_000_000, TORCH, TASK),
    alloc(SCRATCH, 1000, TASK),
    *free(SCRATCH, 1000),
    alloc(GRAD, 4_000_000),
    *free(SAVED, 2_000_000),
    *free(OLD, 300),
)
"""Building, a forward, a backward."""

SIZES = {WEIGHT: 4_000_256, HIDDEN: 5_000_192, SAVED: 2_000_384, GRAD: 4_000_256, OLD: 512}
"""Of blocks that are there at a mark: multiples of 512."""

BASE = 10_000


def mark(at: int, phase: str, live: int, peak: int = 0) -> PhaseMark:
    return PhaseMark(at, phase, BASE + peak, BASE + live, 0, PoolPeaks(reserved=20 * MIB, active=live, requested=live))


MARKS = (
    mark(0, "start", 0),
    mark(2, "forward", 9_000_448, 9_000_448),
    mark(5, "backward", 11_000_832, 11_001_856),
    mark(8, "update", 13_000_192, 15_001_088),
    mark(8, "between", 13_000_192, 13_000_192),
    mark(8, "end", 13_000_192, 13_000_192),
)
LOOKS = tuple(SizeSnapshot(m.at, SIZES) for m in MARKS)


def seen(trace: tuple[dict[str, Any], ...] = STEP, sites: dict[str, Category] | None = None) -> RankEvents:
    found = events_from_trace(list(allocation_entries(trace)), LOOKS, MARKS, sites or {}, base=BASE, stream=0)
    found.named = [
        NamedStorage(2, WEIGHT, 4_000_000, "parameters", "w"),
        NamedStorage(8, GRAD, 4_000_000, "gradients", "w"),
    ]
    return found


def phase(name: PhaseName, found: RankEvents) -> PhasePeak:
    replay = Attribution(found)
    return replay.phase(name, replay.windows)


def test_every_phase_adds_up_to_the_allocators_own_peak() -> None:
    """By name and by life; what blocks are rounded up by is the runtime's, a buffer that nobody names is nobody's."""
    assert phase("built", seen()).held == {"parameters": 4_000_000, "runtime": 256 + 192, "unattributed": 5_000_000}
    forward = phase("forward", seen())
    assert forward.peak == 11_001_856
    assert forward.held == {
        "parameters": 4_000_000,
        "activations": 2_000_000,
        "temporaries": 1000,
        "runtime": 256 + 192 + 384 + 24,
        "unattributed": 5_000_000,
    }
    backward = phase("backward", seen())
    assert backward.peak == sum(backward.held.values()) == 15_001_088
    assert backward.held["gradients"] == 4_000_000
    assert phase("update", seen()).held["runtime"] == 256 + 192 + 256 - 512  # an older block went


def test_a_phase_has_what_the_allocator_counts_beside() -> None:
    """Reserved, active and requested: its own peaks; what it had and nobody had of it is fragmentation."""
    found = phase("forward", seen())
    assert (found.reserved, found.active, found.requested) == (20 * MIB, 11_000_832, 11_000_832)
    account = MemoryAccount(rank=0, method="m", device="cuda", base=BASE, phases=(found,), peaks=())
    assert account.gaps(found) == 20 * MIB - BASE - 11_001_856
    assert account.reserved == 20 * MIB


def test_history_and_count_are_held_together() -> None:
    """At each mark the replay has what the allocator says; an entry that is not what happened shows."""
    assert largest_drift(seen()) == 0
    assert largest_drift(seen((*STEP[:2], alloc(1, 4_000_000), *STEP[3:]))) == 999_936


def test_a_size_that_no_look_tells_is_rounded_up() -> None:
    """To 512 bytes; only a large block may be larger still, by a mebibyte: torch splits off no smaller rest."""
    trace = (alloc(SCRATCH, 1), alloc(OLD, 3 * MIB + 1), *free(OLD, 3 * MIB + 1), *free(SCRATCH, 1))
    found = events_from_trace(list(allocation_entries(trace)), (), (), {}, base=0, stream=0)
    assert found.events["size"].tolist() == [512, 3 * MIB + 512, -3 * MIB - 512, -512]
    assert found.events["live"].tolist() == [512, 3 * MIB + 1024, 512, 0]
    assert found.slack == [0, MIB, 0, 0]


def test_a_look_tells_the_true_size() -> None:
    """Of a block that was given whole, and of one that is older than the history: its free has it, too."""
    trace = (alloc(OLD, 3 * MIB), *free(OLD, 3 * MIB), *free(SCRATCH, 5))
    snapshots = [SizeSnapshot(0, {SCRATCH: 4096}), SizeSnapshot(1, {SCRATCH: 4096, OLD: 4 * MIB})]
    found = events_from_trace(list(allocation_entries(trace)), snapshots, (), {}, base=9000, stream=0)
    assert found.events["size"].tolist() == [4 * MIB, -4 * MIB, -4096]
    assert found.slack == [0, 0, 0]


@pytest.mark.parametrize(("more", "unattributed"), [(MIB, 0), (MIB + 7, 7)])
def test_what_a_large_block_is_larger_by_is_the_runtimes(more: int, unattributed: int) -> None:
    """Up to what it may be; what goes beyond that is nobody's."""
    trace = (alloc(SCRATCH, 3 * MIB), *free(SCRATCH, 3 * MIB))
    marks = [
        PhaseMark(0, "start", 0, 0, 0),
        PhaseMark(0, "forward", 0, 0, 0),
        PhaseMark(2, "end", 3 * MIB + more, 0, 0),
    ]
    found = phase("forward", events_from_trace(list(allocation_entries(trace)), (), marks, {}, base=0, stream=0))
    wanted: dict[Category, int] = {"temporaries": 3 * MIB, "runtime": MIB}
    assert found.held == wanted | ({"unattributed": unattributed} if unattributed else {})


@pytest.mark.parametrize(("shared", "category"), [(True, "communication"), (False, "temporaries")])
def test_another_stream_works_for_other_ranks(shared: bool, category: str) -> None:
    """Where there are any: what a library gathers into is on a stream of its own."""
    trace = (*STEP[:4], alloc(SAVED, 2_000_000, stream=SIDE), alloc(SCRATCH, 1000), *free(SAVED, 0), *free(SCRATCH, 0))
    found = seen(trace)
    found.shared = shared
    assert phase("forward", found).held[category] >= 2_000_000  # pyright: ignore[reportArgumentType]


def test_the_line_that_asked_is_in_the_trace() -> None:
    """The nearest that is not torch's; a library's site gives the category too; a thread without Python has none."""
    sites: dict[str, Category] = {"_fsdp_collectives.py:foreach_all_gather": "communication"}
    trace = (alloc(1, 9, TORCH, TASK), alloc(2, 9, TORCH, GATHER, TASK), *free(1, 9), alloc(3, 9))
    found = events_from_trace(list(allocation_entries(trace)), (), (), sites, base=0, stream=0)
    places = [(site.low, site.high, site.place, site.category) for site in found.sites]
    assert places == [(0, 1, "task.py:7", None), (1, 2, "foreach_all_gather", "communication"), (3, 4, "", None)]


def test_a_snapshots_blocks_lie_one_after_another() -> None:
    """Those that are allocated, of one device: not what waits for a stream, nor what is free."""
    blocks = [(512, "active_allocated"), (1024, "inactive"), (512, "active_awaiting_free"), (2048, "active_allocated")]
    segment = {"device": 0, "address": 4096, "blocks": [{"size": size, "state": state} for size, state in blocks]}
    assert allocated_block_sizes([segment, segment | {"device": 1, "address": 0}], 0) == {4096: 512, 4096 + 2048: 2048}


def test_which_memories_are_watched() -> None:
    """The device that trains comes first; this process preloads no meter."""
    (profiled,) = choose_event_sources(torch.device("cpu"))
    assert isinstance(profiled, ProfilerSource)
    (history,) = choose_event_sources(torch.device("cuda:0"))
    assert isinstance(history, AllocatorHistory)
    assert history.device == "cuda"


def test_an_allocator_without_a_history_is_named() -> None:
    """By the variable that asks for it."""
    assert why_no_history({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}) == ""
    assert why_no_history({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64, backend: cudaMallocAsync"}) == (
        "PYTORCH_CUDA_ALLOC_CONF says backend:cudaMallocAsync, which keeps no history; leave it out"
    )


def test_nvml_counts_by_process() -> None:
    """A process may have several entries; what is not known is said."""
    processes = [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in ((7, 500), (8, 100), (7, 30), (9, None))]
    assert bytes_of_process(processes, 7) == (530, "")
    assert bytes_of_process(processes, 9) == (None, "NVML does not report the memory of each process on this machine")
    assert bytes_of_process(processes, 10) == (
        None,
        "NVML does not list process 10: in a container it shows other process ids",
    )


def test_nvml_that_is_not_there_is_a_sentence() -> None:
    """Its driver, or the GPU of that name."""
    found, why = query_bytes_used("GPU-0")
    assert found is None
    assert why.startswith("NVML failed: ")


def test_what_is_beside_the_allocator() -> None:
    """The driver's count less what the allocator has: CUDA's context, NCCL, Horovod."""
    assert DeviceMemory(name="GPU", reserved=300, used=1000).outside_allocator == 700
    assert DeviceMemory(name="GPU", reserved=300).outside_allocator is None


def test_pinned_pages_add_up() -> None:
    """A block of 3000 bytes takes 4096; what the allocator keeps is the runtime's, what nobody names nobody's."""
    block = NamedBlock(category="optimizer", name="exp_avg", size=3000)
    found = pinned_phase("update", 4096 + 2048, 8192, {16: block})
    assert found.peak == 8192
    assert found.held == {"optimizer": 3000, "runtime": 1096 + 2048, "unattributed": 2048}
    assert found.largest == (block,)


def test_what_is_resident_is_the_hosts() -> None:
    """With CUDA it belongs to the account of the host; without one it is nobody's."""
    resident = ResidentMemory(base=1, peak=2, own=3)
    host = MemoryAccount(rank=0, method="m", device="cpu", base=0, phases=(), peaks=())
    cuda = host.model_copy(update={"device": "cuda"})
    assert host.residing(resident).resident == resident
    both = cuda.model_copy(update={"host": host}).residing(resident)
    assert both.resident is None
    assert both.host is not None
    assert both.host.resident == resident
    assert cuda.residing(resident) == cuda
