"""Memory, measured for real: parts that add up to the peak, and planted bytes that nobody could name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.forks import Forks
from tests.support.tiny import Tiny
from tests.support.watched_strategies import ROOT, compared
from unipar.comparison.request import CompareRequest
from unipar.comparison.strategy_world import MemoryNotRecorded
from unipar.comparison.training_rounds import require_same_method
from unipar.memory.account import CATEGORIES, MEMORY_PHASES, MemoryAccount, account_path, read_account
from unipar.memory.sources import malloc_build
from unipar.results.forecast.forecast_difference import forecast_differences
from unipar.results.forecast.records import Forecast
from unipar.results.row import StrategyResult

PLANTED, LISTED = 5_000_000, 3_000_000


WEIGHTS = 4 * 512 * 512 * 4
"""Bytes of the matrices, the tied one counted once."""


NORM = 2 * 512 * 4
"""Of the LayerNorm."""


def held(row: Mapping[str, Any], phase: str, rank: int = 0) -> dict[str, int]:
    return next(p["held"] for p in row["memory"][rank]["phases"] if p["name"] == phase)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, forks: Forks) -> dict[str, Any]:
    strategies = ("native/nothing", "native/parameters", "faulty/nothing+hidden-buffer", "faulty/nothing+nameless")
    return compared(tmp_path_factory.mktemp("memory"), *strategies, forks=forks)


def test_parts_add_up_to_the_peak_in_every_phase(found: dict[str, Any]) -> None:
    """On every rank, and but for a fiftieth every byte has a name."""
    for strategy in ("single", "native/nothing", "native/parameters"):
        for account in found[strategy]["memory"]:
            assert [phase["name"] for phase in account["phases"]] == list(MEMORY_PHASES)
            for phase in account["phases"]:
                assert sum(phase["held"].values()) == phase["peak"] > 0
                assert set(phase["held"]) <= set(CATEGORIES)
                rest = phase["held"].get("unattributed", 0)  # negative where something is counted twice
                assert -0.001 * phase["peak"] <= rest <= 0.02 * phase["peak"], (strategy, phase)


def test_the_curve_goes_through_a_whole_step(found: dict[str, Any]) -> None:
    """By time, from the first phase to the end; its highest point is the fullest phase of that step."""
    for account in found["native/nothing"]["memory"]:
        times = [at for at, _ in account["curve"]]
        assert times == sorted(times)
        assert (times[0], times[-1]) == (0.0, 1.0)
        assert [phase for _, phase in account["marks"]] == ["data", "forward", "backward", "update", "between"]
        begins = [at for at, _ in account["marks"]]
        assert begins == sorted(begins)
        assert len(set(begins)) == 5
        assert max(held for _, held in account["curve"]) == max(p["peak"] for p in account["phases"][1:])


def test_the_curve_has_blocks_that_are_too_small_to_be_noted() -> None:
    """A hundred of less than a KiB on top of a mebibyte, in a process with the meter: to the byte the phase's peak."""
    code = """
import numpy
from unipar.memory.recording.attribution import Attribution
from unipar.memory.sources.malloc_meter import MallocMeter

meter = MallocMeter()
meter.begin()
meter.mark("forward")
big = bytearray(2**20)
crumbs = [bytearray(900) for _ in range(100)]
del crumbs
meter.mark("backward")
del big
meter.mark("update")
crumbs = [bytearray(900) for _ in range(100)]
del crumbs
meter.mark("end")
meter.end()
replay = Attribution(meter.collect_events())
peaks = [window.peak - replay._trace.base for window in replay.windows]
borders = [0, 1 / 3, 2 / 3, 1]
curve = list(replay.curve(replay.windows, [1.0, 1.0, 1.0]))
highest = [max(held for at, held in curve[:-1] if low <= at < high) for low, high in zip(borders, borders[1:])]
print(peaks, highest)
"""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        **malloc_build.preload_environment(malloc_build.build_meter()),
    }
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    peaks, highest = (json.loads(part + "]") for part in done.stdout.strip().removesuffix("]").split("] "))
    assert highest == peaks
    assert peaks[0] > 2**20 + 100 * 900
    assert peaks[2] > 100 * 900


def test_a_tied_weight_counts_once(found: dict[str, Any]) -> None:
    """Four matrices of a mebibyte, though five modules have one; two moments for each."""
    for strategy in ("single", "native/nothing"):
        told = held(found[strategy], "update")
        assert told["parameters"] == WEIGHTS + NORM
        assert told["optimizer"] - 2 * (WEIGHTS + NORM) in range(1024)  # and the count of steps


def test_parameters_that_are_split_are_halved(found: dict[str, Any]) -> None:
    """Between two steps, on two ranks."""
    whole, split = (held(found[strategy], "steady") for strategy in ("native/nothing", "native/parameters"))
    assert split["parameters"] == pytest.approx(whole["parameters"] / 2, rel=0.01)
    assert split["optimizer"] == pytest.approx(whole["optimizer"] / 2, rel=0.01)


def test_a_hidden_buffer_of_an_engine_is_unattributed(found: dict[str, Any]) -> None:
    """In every phase after it was made, on the rank that has it, under its true size."""
    row = found["faulty/nothing+hidden-buffer"]
    for phase in ("forward", "backward", "update", "steady"):
        assert PLANTED <= held(row, phase)["unattributed"] < 1.1 * PLANTED
    assert "unattributed" in {block["category"] for block in row["memory"][0]["phases"][1]["largest"]}


def test_a_double_count_is_none(found: dict[str, Any]) -> None:
    """What an engine lists under three names and in two categories is there once, under the first of the categories."""
    for account in found["faulty/nothing+hidden-buffer"]["memory"]:
        for phase in account["phases"]:
            assert phase["held"]["masters"] == LISTED
            assert "buffers" not in phase["held"]
            assert phase["held"].get("unattributed", 0) >= (0 if phase["name"] == "built" else PLANTED)


def test_what_breaks_in_watching_is_a_note(found: dict[str, Any]) -> None:
    """The strategy trains on, is timed and agrees; it has no memory, and says why."""
    row = found["faulty/nothing+nameless"]
    assert (row["outcome"], row["memory"]) == ("ran", [])
    assert row["note"] == "memory was not recorded: on rank 1, ArithmeticError: it cannot be said"
    assert row["losses"] == found["faulty/nothing+hidden-buffer"]["losses"]
    assert sum(map(len, row["seconds"])) == 3
    assert f"faulty/nothing+nameless: {row['note']}" in " ".join(found["said"].split())
    assert "no page" not in found["said"]


def test_malloc_keeps_what_is_freed_while_steps_are_timed(found: dict[str, Any]) -> None:
    """On every rank of every strategy, one whose watching broke too. One process has two microbatches a step.

    The process that plans runs the loss on three microbatches, once all have ended.
    """
    assert sorted(found["mapped"]) == ["000", *["1111000000"] * 8, "11111111000000000000"]


def test_strategies_are_planned_after_they_ran(found: dict[str, Any]) -> None:
    """Bytes sent are equal, peaks near what was measured; a backend that plans nothing is one sentence."""
    told = Forecast.model_validate(found["forecast"], strict=False)
    rows = [StrategyResult.read(found[name]) for name in ("single", "native/nothing", "native/parameters")]
    compared_strategies = forecast_differences(told, rows)
    assert [(each.strategy, each.same_volume) for each in compared_strategies] == [(row.strategy, True) for row in rows]
    assert [abs(each.off) < 0.01 for each in compared_strategies[:2]] == [True, True]
    assert abs(compared_strategies[2].off) < 0.15  # when FSDP2's copies in gloo are freed differs
    assert (told.problem, told.ranks, told.samples, told.share, told.memory_from) == ("", 2, 8, 4, "machine")
    why = "faulty: its memory is not planned yet; `unipar compare` measures it"
    names = ("faulty/nothing+hidden-buffer", "faulty/nothing+nameless")
    assert {strategy.strategy: strategy.refusal for strategy in told.strategies if strategy.refusal} == dict.fromkeys(
        names, why
    )
    said = " ".join(found["said"].split())
    assert "plan: predicted peaks of 3 strategies are within " in said
    assert f"plan: {names[0]} and {names[1]} are not planned: {why}" in said


def test_what_a_loss_keeps_outside_the_graph_is_unattributed(forks: Forks, tmp_path: Path) -> None:
    """The tensor comes in the forward and goes in the backward, as activations do; autograd does not know of it."""
    row = compared(tmp_path, "native/nothing", plant="outside the graph", forks=forks)["single"]
    by_lifetime, saved = row["memory"][0]["saved"]
    assert PLANTED <= by_lifetime - saved < 1.1 * PLANTED
    told = held(row, "forward")
    assert PLANTED <= told["unattributed"] < 1.1 * PLANTED
    assert 40_000 < told["activations"] < 60_000
    largest = next(p["largest"] for p in row["memory"][0]["phases"] if p["name"] == "forward")
    assert largest[0]["category"] == "unattributed"
    assert largest[0]["name"].startswith("aten.ones.default in task.py:")


def test_what_a_loss_keeps_for_good_is_unattributed(forks: Forks, tmp_path: Path) -> None:
    """The tensor came in a forward, and stays."""
    row = compared(tmp_path, "native/nothing", plant="for good", forks=forks)["native/nothing"]
    assert PLANTED <= held(row, "steady", rank=1)["unattributed"] < 1.1 * PLANTED


@pytest.mark.sweep
def test_what_is_offloaded_on_the_cpu_is_in_the_same_account(forks: Forks, tmp_path: Path) -> None:
    """DeepSpeed puts the optimizer's states where they would be anyway: half of them on each of two ranks."""
    options = {"deepspeed": {"offload_optimizer": "cpu", "cpu_adam": "torch"}}
    row = compared(tmp_path, "deepspeed/gradients", forks=forks, options=options)["deepspeed/gradients"]
    (account, _) = row["memory"]
    assert account["host"] is None
    for phase in account["phases"]:
        assert sum(phase["held"].values()) == phase["peak"]
        assert abs(phase["held"].get("unattributed", 0)) <= 0.02 * phase["peak"]
    assert account["phases"][-1]["held"]["optimizer"] == pytest.approx(WEIGHTS + NORM, rel=0.01)


def test_the_tables_show_three_columns_and_every_category(found: dict[str, Any]) -> None:
    """Allocated, resident and predicted; then MiB by what they are for."""
    lines = found["said"].splitlines()
    assert next(line for line in lines if line.startswith("strategy ")).split()[-1] == "allocated"
    sizes = next(line for line in lines if line.startswith("memory  "))
    assert sizes.split(maxsplit=1)[1] == "fullest in  allocated  resident  on CUDA"
    parts = next(line for line in lines if line.startswith("MiB "))
    assert parts.split() == ["MiB", "param", "grad", "optim", "comm", "activ", "temp", "rest", "?"]
    assert max(len(line) for line in lines if " /" not in line) <= 80  # a path is as long as it is


def test_resident_memory_is_measured_last(found: dict[str, Any]) -> None:
    """With the base it is beyond, and what is the process's own."""
    resident = found["native/nothing"]["memory"][0]["resident"]
    assert resident["peak"] > resident["base"] > 5 * 2**20  # without the libraries, which are the fork server's
    assert resident["own"] > 0


def test_memory_can_be_left_out(forks: Forks, tmp_path: Path) -> None:
    """Then the table shows what the system counted, as it is."""
    found = compared(tmp_path, "native/nothing", forks=forks, compare={"memory": False})
    assert found["native/nothing"]["memory"] == []
    header = next(line for line in found["said"].splitlines() if line.startswith("strategy "))
    assert header.split()[-1] == "RSS"


def test_without_a_compiler_a_profiler_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forks: Forks) -> None:
    """The account says what is missing, and how to get it; what was seen adds up, and what has a name its true size."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    found = compared(tmp_path, "native/nothing", "faulty/nothing+hidden-buffer", forks=forks)
    said = " ".join(found["said"].split())
    assert (
        "memory was recorded of torch's own tensors only: no C compiler (cc, gcc or clang) was found: install one "
        "(Debian: apt install gcc libc6-dev)" in said
    )
    for account in found["native/nothing"]["memory"]:
        assert account["method"] == "torch's own allocator, by a profiler's events"
        assert [phase["name"] for phase in account["phases"]] == list(MEMORY_PHASES)
        for phase in account["phases"]:
            assert sum(phase["held"].values()) == phase["peak"] > 0
            assert abs(phase["held"].get("unattributed", 0)) <= 0.02 * phase["peak"], phase
    told = held(found["native/nothing"], "steady", rank=1)
    assert told["parameters"] == WEIGHTS + NORM
    assert told["optimizer"] - 2 * (WEIGHTS + NORM) in range(64)
    row = found["faulty/nothing+hidden-buffer"]
    assert PLANTED <= held(row, "steady")["unattributed"] < 1.01 * PLANTED


def test_a_compiler_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In its own last words."""
    (tmp_path / "cc").write_text("#!/bin/sh\necho 'no space left' >&2\nexit 4\n", encoding="utf-8")
    (tmp_path / "cc").chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    with pytest.raises(malloc_build.MeterUnavailable) as e:
        malloc_build.build_meter()
    assert str(e.value) == f"{tmp_path}/cc cannot compile it: no space left"


def test_a_cache_that_cannot_be_written_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is another way to watch, so it ends nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    with pytest.raises(malloc_build.MeterUnavailable) as e:
        malloc_build.build_meter()
    assert str(e.value) == (
        "it cannot be stored in the user's cache ([Errno 2] No such file or directory: '/proc/nowhere'): "
        "set XDG_CACHE_HOME to another folder"
    )


def test_a_cache_that_nothing_is_preloaded_from_is_a_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """LD_PRELOAD is cut at spaces: it would be left out, and nobody told."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "my cache"))
    with pytest.raises(malloc_build.MeterUnavailable) as e:
        malloc_build.build_meter()
    (made,) = (tmp_path / "my cache" / "unipar").iterdir()
    assert str(e.value) == (
        f"it cannot be preloaded from {made} (cannot open shared object file): set XDG_CACHE_HOME to another folder"
    )


def test_memory_that_was_seen_in_two_ways_is_not_set_side_by_side() -> None:
    """One rank without what the others have would count less, and look smaller."""
    by = {
        way: MemoryAccount(rank=1, method=way, device="cpu", base=1, phases=(), peaks=())
        for way in ("meter", "profiler")
    }
    rows = [
        StrategyResult(strategy="single", outcome="waits", memory=[by["meter"]]),
        StrategyResult(strategy="native/nothing", outcome="waits"),
    ]
    assert require_same_method([by["meter"]], rows) == [by["meter"]]
    with pytest.raises(MemoryNotRecorded) as e:
        require_same_method([by["meter"], by["profiler"]], rows)
    assert str(e.value) == "on rank 1 it was recorded in another way (profiler) than in single (meter)"
    with pytest.raises(MemoryNotRecorded) as e:
        require_same_method([by["profiler"].model_copy(update={"rank": 0}), by["meter"]], [])
    assert str(e.value) == "on rank 1 it was recorded in another way (meter) than on rank 0 (profiler)"


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        (9, "memory was recorded in 4 steps: train.steps: 9 leaves no more; 10 steps are enough"),
        (6, "memory was recorded in 1 step, communication in none: train.steps: 6 leaves no more; 10 steps are enough"),
        (5, "memory was not recorded: train.steps: 5 leaves no step for it besides the timed ones"),
        (10, ""),
    ],
)
def test_too_few_steps_to_watch_are_told(steps: int, said: str) -> None:
    """Two to warm up and three turns are taken first."""
    config = {"device": "cpu", "parallel": {"data": 2}, "batch": {"total": 8}, "train": {"steps": steps}}
    assert CompareRequest.of(config, None, Tiny, "").unwatched == said


def test_an_account_that_cannot_be_read_is_a_sentence(tmp_path: Path) -> None:
    """Absent, cut short, or somebody else's."""
    from unipar.errors import ReportError

    with pytest.raises(ReportError) as e:
        read_account(tmp_path, 0)
    assert (
        str(e.value) == f"rank 0 wrote no account of its memory ({account_path(tmp_path, 0)} is missing); "
        "run it again with log.memory: true"
    )
    whole = MemoryAccount(rank=0, method="m", device="cpu", base=1, phases=(), peaks=()).model_dump_json()
    account_path(tmp_path, 0).write_text(whole[:-9], encoding="utf-8")
    with pytest.raises(ReportError, match=r"memory.json is not the account of a rank's memory \(the whole file: "):
        read_account(tmp_path, 0)
    account_path(tmp_path, 0).write_text(whole.replace('"rank"', '"rang"'), encoding="utf-8")
    with pytest.raises(ReportError, match=r"\(rank: Field required\)"):
        read_account(tmp_path, 0)
