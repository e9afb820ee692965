"""A plan in one screen: what to take, then a table without bytes by category, then the next steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from unipar.backend import Category
from unipar.planning.peaks import PredictedPeak
from unipar.planning.plan_screen import format_plan_screen
from unipar.planning.planned_strategy import UNEVEN, PlannedStrategies, PlannedStrategy

MIB = 2**20
HALF = "batch.total (32) is not a multiple of micro x data (8 x 8 = 64)"


def planned(strategy: str, name: str, kept: int, runtime: int = 0, **changed: Any) -> PlannedStrategy:
    """Return a row on two ranks, with MiB of optimizer states and of CUDA's context."""
    held: dict[Category, int] = {"optimizer": kept * MIB, "activations": MIB, "runtime": runtime * MIB}
    peak = PredictedPeak("backward", sum(held.values()), held, ())
    return PlannedStrategy(strategy, 2, 8, (peak,), library_name=name, **changed)


def lines_of(*rows: PlannedStrategy, memory: int | None = None, device: str = "cpu", **changed: Any) -> list[str]:
    plan = PlannedStrategies(rows, memory, 0.0, device, 1_000_000, 1.0, **changed)
    return format_plan_screen(plan, 80, ["the same with --details"]).splitlines()


def test_the_screen() -> None:
    """Several strategies that are refused for one reason are a row; columns of categories are in the details."""
    refused = [PlannedStrategy(strategy, 8, refusal=HALF) for strategy in ("native/nothing", "native/parameters")]
    ddp = planned("native/nothing", "DDP", 8, largest=8)
    fsdp2 = planned("native/parameters", "FSDP2", 4, largest=16)
    assert lines_of(ddp, fsdp2, *refused, memory=20 * MIB) == [
        "take, on 2 ranks: native/nothing with micro 8: it fits (9.0 MiB of 20 MiB), and",
        "  is the simplest of 2 strategies that fit",
        "take, on 8 ranks: no strategy can be planned here",
        "",
        "strategy           ranks  known as     peak  fits  largest micro",
        "native/nothing         2  DDP       9.0 MiB  yes               8",
        "native/parameters      2  FSDP2     5.0 MiB  yes              16",
        "all 2 strategies       8  batch.total (32) is not a multiple of micro x data ...",
        "",
        "next: the same with --details",
    ]


def test_what_does_not_fit_stays_in_the_answer() -> None:
    """How much is missing, what would fit, and that other microbatches are estimates, where these count."""
    ddp = planned("native/nothing", "DDP", 8, least=9 * MIB, ways=("needs 1.0 MiB more", "native/parameters fits"))
    lines = lines_of(ddp, memory=8 * MIB, notes=(UNEVEN,))
    assert lines[:5] == [
        "take, on 2 ranks: nothing fits; native/nothing comes nearest, and needs 1.0 MiB",
        "  more, whatever the micro",
        "native/nothing on 2: needs 1.0 MiB more; native/parameters fits",
        "activations do not grow evenly with the microbatch: other sizes are estimates",
        "",
    ]
    assert UNEVEN not in lines_of(replace(ddp, largest=8), memory=80 * MIB, notes=(UNEVEN,))


def test_peaks_that_are_the_runtime_s() -> None:
    """On a GPU, where CUDA's context outweighs the model; if one does not fit, memory does tell them apart."""
    rows = planned("native/nothing", "DDP", 16, 700), planned("native/parameters", "FSDP2", 8, 700)
    says = "memory does not tell these strategies on 2 ranks apart at this size: their"
    assert [line for line in lines_of(*rows, device="cuda") if line.startswith("memory")] == [says]
    assert "  it would with about 88 million parameters or more" in lines_of(*rows, device="cuda")
    tight = [replace(row, largest=8, least=1) for row in rows]
    assert not [line for line in lines_of(*tight, device="cuda", memory=710 * MIB) if line.startswith("memory")]


def test_missing_seconds_stay_in_the_answer() -> None:
    """What has no seconds cannot be the fastest."""
    note = "no seconds for native/nothing: the bytes that they send are not planned yet"
    assert note in lines_of(planned("native/nothing", "DDP", 8), notes=("a note", note))
    assert "a note" not in lines_of(planned("native/nothing", "DDP", 8), notes=("a note", note))
