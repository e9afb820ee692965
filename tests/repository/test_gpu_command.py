"""`make gpu` without a GPU: its rows, its table and file, and rows that fail, take too long or are left for later."""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import wheels
from benchmarks.gpu.__main__ import Runner, main, row_environment
from benchmarks.gpu.results import GpuResults, RowResult
from benchmarks.gpu.row import check_account, largest_difference
from benchmarks.gpu.rows import ROOT, Row, all_rows, marked_tests, select_rows
from benchmarks.gpu.wheels import NEEDED, WheelsMissing, missing_packages, pinned_versions, prepare_site
from tests.support.cuda_accounts import account

MIB = 2**20
MACHINE: dict[str, Any] = {"gpus": [], "driver": "", "versions": {"python": "3.12.3", "torch": "2.11.0"}}
NOTHING = {"test": "tests/no_such_file.py"}
"""Argument of a row that fails at once, without importing torch."""


def test_without_a_gpu_every_device_row_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command ends well, with a table and a JSON file that has the versions."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main(["--out", str(tmp_path), "--only", "verify,compare/2", "--only", "tests/test_fp16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[:6]] == [
        ["row", "ranks", "s", "result", "figure"],
        ["compare/2", "2", "0", "no", "GPU"],
        ["verify/2/native", "2", "0", "no", "GPU"],
        ["verify/2/deepspeed", "2", "0", "no", "GPU"],
        ["verify/2/accelerate", "2", "0", "no", "GPU"],
        ["tests/test_fp16", "1", "0", "no", "GPU"],
    ]
    assert lines[-2:] == ["5 no GPU", f"written to {tmp_path}/gpu.json"]
    data = json.loads((tmp_path / "gpu.json").read_text("utf-8"))
    assert {row["result"] for row in data["rows"]} == {"no GPU"}
    assert data["machine"]["gpus"] == []
    assert data["machine"]["versions"].keys() >= {"python", "torch", "CUDA of torch", "deepspeed", "accelerate"}


def runner(folder: Path, minutes: float = 5.0) -> tuple[Runner, GpuResults]:
    results = GpuResults(MACHINE)
    options = Namespace(device="cuda", jobs=2, patience=1.0, minutes=minutes)
    environment = row_environment(ROOT, str(folder))
    return Runner(results, folder / "gpu.json", environment, options, folder / "logs"), results


def test_a_row_that_fails_or_takes_too_long_does_not_end_the_others(tmp_path: Path) -> None:
    """Each has its result, and the exit code is 1."""
    rows = [
        Row("wrong", "test", NOTHING, needs_gpu=False),
        Row("slow", "test", NOTHING, needs_gpu=False, limit=0),
        Row("unknown", "no such kind", needs_gpu=False),
        Row("absent", "device"),
    ]
    run, results = runner(tmp_path)
    assert run.run(rows) == 0
    assert {row.row: row.result for row in results.rows} == {
        "wrong": "failed",
        "slow": "too late",
        "unknown": "failed",
        "absent": "no GPU",
    }
    figures = {row.row: row.figure for row in results.rows}
    assert figures["unknown"] == "KeyError: 'no such kind'"
    assert figures["slow"] == "over 0 s; its log is empty"
    assert results.code(rows) == 1
    assert results.code(rows[3:]) == 0


def test_what_is_left_when_time_is_over_is_continued(tmp_path: Path) -> None:
    """A row that was stopped is no result: the next call runs it, on the same machine, and only it."""
    rows = [Row("first", "device"), Row("second", "test", NOTHING, needs_gpu=False), Row("third", "device", alone=True)]
    run, results = runner(tmp_path, minutes=0.0)
    assert run.run(rows[1:]) == 0
    assert {row.row: row.result for row in results.rows} == {"second": "stopped", "third": "no GPU"}
    results.add(RowResult(row="first", ranks=1, result="passed", figure="", seconds=1.0), tmp_path / "gpu.json")
    again = GpuResults.read(tmp_path / "gpu.json", MACHINE)
    assert [row.name for row in again.missing(rows)] == ["second", "third"]
    assert GpuResults.read(tmp_path / "gpu.json", MACHINE | {"gpus": ["another"]}).rows == []
    assert "1 passed, 2 not run" in again.table(rows, 80)
    assert again.code(rows) == 1


def test_ctrl_c_keeps_what_was_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The row that ran is written as stopped."""

    sleeps: list[float] = []

    def interrupt(seconds: float) -> None:
        sleeps.append(seconds)
        if len(sleeps) == 1:
            raise KeyboardInterrupt

    run, _ = runner(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(time, "sleep", interrupt)
        assert run.run([Row("absent", "device"), Row("going", "test", NOTHING, needs_gpu=False)]) == 130
    rows = json.loads((tmp_path / "gpu.json").read_text("utf-8"))["rows"]
    assert [(row["row"], row["result"]) for row in rows] == [("absent", "no GPU"), ("going", "stopped")]


def test_rows_are_named_once_and_every_marked_test_is_one() -> None:
    """Files are marked gpu, or tests of a file; a name or its beginning selects rows."""
    rows = all_rows()
    assert len({row.name for row in rows}) == len(rows)
    assert "tests/backends/test_gpu.py::test_fp16" in marked_tests()
    assert "tests/memory/test_gpu_memory.py::test_what_is_offloaded_is_the_hosts" in marked_tests()
    of_one_file = [name for name in marked_tests() if name.startswith("tests/model/test_create.py::")]
    assert of_one_file == ["tests/model/test_create.py::test_on_a_cpu_and_a_gpu"]
    assert [row.name for row in select_rows(rows, ["compare", "account/2/native/p*"])] == [
        "compare/1",
        "compare/2",
        "account/2/native/parameters",
    ]
    with pytest.raises(ValueError, match=r"^no row is called verfy; rows begin with account, bf16-master, "):
        select_rows(rows, ["verfy"])


def test_a_run_log_that_differs_from_the_allocators_peak(tmp_path: Path) -> None:
    """Base and largest phase are 1100 MiB; beyond a hundredth the row fails, and so does a missing peak."""
    found: list[tuple[str, bool]] = []
    for own in (1100, 1108, 1112):
        (tmp_path / "peak-0.json").write_text(str(own * MIB), encoding="utf-8")
        found.append(check_account(account(), str(tmp_path)))
    assert [good for _, good in found] == [True, True, False]
    assert found[2][0] == (
        "rank 0: sum 1100.0 MiB, max_memory_allocated 1112.0 MiB, 0.00 % without a category in backward; the two differ"
    )
    (tmp_path / "peak-0.json").unlink()
    assert check_account(account(), str(tmp_path))[1] is False


@pytest.mark.parametrize(
    ("losses", "difference"),
    [([2.0, 1.0], 0.0), ([2.0, 1.1], 0.1), ([2.0], float("inf")), ([2.0, float("nan")], float("inf"))],
)
def test_losses_are_compared_step_by_step(losses: list[float], difference: float) -> None:
    """A series that is shorter, or not finite, agrees with nothing."""
    assert largest_difference(losses, [2.0, 1.0]) == pytest.approx(difference)


def test_what_is_needed_is_pinned() -> None:
    """constraints.txt has a version for each, and this environment has them all."""
    assert set(pinned_versions()) == set(NEEDED)
    assert missing_packages() == []


def test_no_wheels_and_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sentence says where to fetch them."""

    def fail(*words: str, **more: Any) -> None:
        raise WheelsMissing("pip wheel failed: ERROR: No matching distribution found for deepspeed")

    monkeypatch.setattr(wheels, "_run_pip", fail)
    monkeypatch.setattr(wheels, "missing_packages", lambda: ["pydantic"])
    with pytest.raises(WheelsMissing) as e:
        prepare_site(tmp_path / "out", tmp_path / "none")
    assert str(e.value) == (
        f"{tmp_path}/none has no wheels, and others cannot be fetched: "
        "pip wheel failed: ERROR: No matching distribution found for deepspeed\n"
        "run `make gpu-wheels` on a machine with a network (any Python there does for CPython 3.12 on x86-64), "
        "and copy that folder here"
    )
