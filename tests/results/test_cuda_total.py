"""Tables and pages of runs on CUDA, from accounts that are made up: no GPU was asked."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.comparisons import edit_example_comparison, write_example_comparison
from tests.support.cuda_accounts import GPU, MIB, account
from unipar.memory.account import MemoryAccount, PhasePeak, ResidentMemory
from unipar.planning.cuda_total import MeasuredCudaMemory, PredictedCudaMemory, total_on_cuda
from unipar.report.data.comparison_data import ComparisonPageData
from unipar.report.pages.comparison_page import render_comparison
from unipar.results.memory_tables import RanksMemory, describe_memory_columns, format_memory_tables

HOST = MemoryAccount(
    rank=0,
    method="malloc",
    device="cpu",
    base=0,
    phases=(PhasePeak(name="update", peak=300 * MIB, held={"parameters": 300 * MIB}),),
    peaks=(300 * MIB,),
    resident=ResidentMemory(base=0, peak=400 * MIB, own=0),
)


def test_on_cuda_it_is_measured() -> None:
    """The total is what the allocator reserved and what the driver counts beside it."""
    assert total_on_cuda(account(), 2) == MeasuredCudaMemory(reserved=1400 * MIB, outside_allocator=500 * MIB)
    assert total_on_cuda(account(), 2).total == 1900 * MIB


def test_without_the_driver_the_rest_is_assumed() -> None:
    """But gaps and rounding are in what the allocator has."""
    assert total_on_cuda(account(None), 2) == PredictedCudaMemory(1400 * MIB, 500 * MIB, 200 * MIB, 0)
    assert total_on_cuda(account(None), 1).total == 1900 * MIB


def test_the_table_of_a_run_on_cuda() -> None:
    """Allocated, reserved, gaps, all that the process takes, and the host."""
    lines = format_memory_tables(
        [RanksMemory("native/nothing", 2, [account(host=HOST)]), RanksMemory("single", 1, [account(None)])], 80
    )
    assert lines[:3] == [
        "memory          fullest in  allocated  reserved     gaps  on CUDA     host",
        "native/nothing  backward      1.0 GiB   1.4 GiB  300 MiB  1.9 GiB  364 MiB",
        "single          backward      1.0 GiB   1.4 GiB  300 MiB  1.9 GiB        -",
    ]
    assert format_memory_tables([RanksMemory("native/nothing", 2, [account(None)])], 80)[1].split()[-3:] == [
        "2.1",
        "GiB",
        "-",
    ]


@pytest.mark.parametrize(
    ("used", "says"),
    [(1900 * MIB, "measured, what NVML counts for the process"), (None, "reserved + context + NCCL, both assumed")],
)
def test_the_table_says_what_was_measured_and_where(used: int | None, says: str) -> None:
    """The text names the GPU."""
    assert [remark.text for remark in describe_memory_columns([account(used)])] == [
        f"allocated: the peak beyond the base of the largest rank, as torch's allocator on {GPU} counts it",
        "reserved: the most device memory that the allocator held; gaps: its unused part in the fullest phase",
        f"on CUDA: {says}; host: the same rank's own memory beyond its base, and pinned pages",
    ]


def paged(folder: Path, **more: int | None) -> str:
    """The page of a comparison whose every rank is that one."""
    memory = [account(host=HOST, **more).model_dump(mode="json")]
    run = edit_example_comparison(
        write_example_comparison(folder / "run"),
        lambda data: [c.update(memory=memory) for c in data["strategies"][:-1]],
    )
    return re.sub(r"<[^>]*>", " ", render_comparison(ComparisonPageData.read(run))).replace("\N{NO-BREAK SPACE}", " ")


def row(*words: str) -> str:
    return r"\s+".join(map(re.escape, words))


def test_the_page_of_a_run_on_cuda(tmp_path: Path) -> None:
    """Three columns, the allocator by phase, the driver's count, and the host's two kinds of memory."""
    text = paged(tmp_path)
    assert f"memory counted on the {GPU}" in text
    assert re.search(row("allocated here", "reserved here", "on CUDA (measured)"), text)
    assert re.search(row("1.57", "9.7", "1.0 GiB", "1.4 GiB", "1.9 GiB"), text)
    assert re.search(row("backward", "1.0 GiB", "1.1 GiB", "1.1 GiB", "1.4 GiB", "300 MiB"), text)
    assert re.search(row(GPU, "1.9 GiB", "1.4 GiB", "500 MiB"), text)
    assert re.search(row("malloc", "update", "300 MiB", "300 MiB"), text)
    assert re.search(row("pinned", "update", "64 MiB"), text)
    assert "assumed, not measured" not in text


def test_the_page_without_the_driver(tmp_path: Path) -> None:
    """Memory of CUDA and NCCL is predicted, and the page says so."""
    text = paged(tmp_path, used=None)
    assert re.search(row("allocated here", "reserved here", "on CUDA (predicted)"), text)
    assert "The memory that CUDA and NCCL take for themselves was not measured." in text
    assert "On CUDA: assumed, not measured" in text


def test_a_page_of_the_cpu_has_no_such_section(tmp_path: Path) -> None:
    """The page of a comparison on the CPU says nothing of a device."""
    text = render_comparison(ComparisonPageData.read(write_example_comparison(tmp_path / "run")))
    assert "Device and host memory" not in text
