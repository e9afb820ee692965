"""`log.trace`: some steps of a run, traced by torch's profiler."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import unipar
from benchmarks.timing import count_calls
from tests.support.running import Line, running
from tests.support.tiny import CONFIG
from tests.support.world import short_folder
from unipar.engines.wrapper import WrapperEngine
from unipar.errors import ConfigError, Stopped
from unipar.results.run_traces import read_traces
from unipar.run_folder.layout import run_log_path
from unipar.run_folder.run_log import RunLog
from unipar.training.stopping import request_stop
from unipar.training.tracing import step_trace
from unipar.training.training_run import TrainingRun

pytestmark = pytest.mark.forked


def read(folder: Path, rank: int = 0) -> list[dict[str, Any]]:
    with gzip.open(folder / "trace" / f"rank-{rank}.json.gz") as file:
        return json.load(file)["traceEvents"]


TASK = {"use": "tests.support.tiny:Tiny"}


def phases(events: list[dict[str, Any]]) -> list[str]:
    """Names of steps, phases and what is in them, in their order."""
    found = [e for e in events if e.get("cat") == "phase" and "axis" not in e["args"]]
    return [e["name"] for e in sorted(found, key=lambda e: (e["ts"], -e["dur"]))]


def noted(folder: Path) -> list[str]:
    return [row["said"] for row in RunLog.read(run_log_path(folder, 0)) if row["event"] == "no trace"]


def train(run: TrainingRun, *, at: int, act: Callable[[], object]) -> None:
    """Train, and call `act` just before this step."""
    for batch in run.batches():
        if run.done == at - 1:
            act()
        run.step(batch)


STEP = ["data", "forward", "backward", "forward", "backward", "update", "reduction", "clip", "optimizer", "between"]


def settings(first: int, last: int, steps: int = 6, **log: Any) -> dict[str, Any]:
    train = {"steps": steps, "optimizer": {"name": "sgd", "lr": 1e-3}, "clip": 1.0}
    return {"train": train, "log": {"every": 1, "trace": {"steps": [first, last]}, **log}}


def test_two_ranks_of_which_one_is_traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file has steps, phases and collectives with axis and bytes; the losses are the same to the last digit."""
    told = CONFIG | {"train": {**CONFIG["train"], "steps": 6, "clip": 1.0}, "task": TASK}
    with short_folder(monkeypatch):
        plain = unipar.launch({**told, "log": {"every": 1}, "out": str(tmp_path / "plain")})
        trace = {"steps": [3, 4], "ranks": [1]}
        traced = unipar.launch({**told, "log": {"every": 1, "trace": trace}, "out": str(tmp_path / "traced")})
    assert traced.losses == plain.losses
    assert [file.name for file in (tmp_path / "traced/trace").iterdir()] == ["rank-1.json.gz"]
    assert not (tmp_path / "plain/trace").exists()
    events = read(tmp_path / "traced", 1)
    step = [*STEP[:3], *STEP[5:]]
    assert phases(events) == ["step 3", *step, "step 4", *step]
    work = [e for e in events if e["name"] == "all_reduce over data, 20 B" and e["cat"] == "user_annotation"]
    assert [(e["args"]["axis"], e["args"]["bytes"]) for e in work] == 2 * [("data", 20)]
    (found,) = read_traces(tmp_path / "traced")
    assert (found.rank, found.first, found.last, found.counted_on) == (1, 3, 4, "CPU")
    assert found.others is not None
    assert {"all_reduce over data", "aten::addmm"} <= {entry.name for entry in found.entries} | {"aten::addmm"}


def test_deepspeed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its engine clips in a range of its own; the optimizer has the name that torch gives it."""
    told = CONFIG | {"train": {**CONFIG["train"], "steps": 4, "clip": 1.0}, "task": TASK, "backend": "deepspeed"}
    with short_folder(monkeypatch):
        unipar.launch({**told, "log": {"trace": {"steps": [3, 3]}}, "out": str(tmp_path / "run")})
    events = read(tmp_path / "run")
    assert phases(events) == ["step 3", "data", "forward", "backward", "update", "clip", "between"]
    assert "Optimizer.step#SGD.step" in {event["name"] for event in events}


def test_microbatches_and_parts_of_the_update(tmp_path: Path) -> None:
    """Phases follow each other in a step; the engine is as before when the trace has ended."""
    with running(Line(), tmp_path, **settings(2, 3)) as run:
        run.train()
        assert isinstance(run.engine, WrapperEngine)
        assert not {"norm", "update", "finish_reduction", "norm_in_fp64"} & set(vars(run.engine))
        assert run.heartbeat.on_phase is None
    assert phases(read(tmp_path)) == ["step 2", *STEP, "step 3", *STEP]


def test_bytes_by_category(tmp_path: Path) -> None:
    """With `log.memory`, as each phase begins; a model of one weight has 4 bytes of parameters."""
    with running(Line(), tmp_path, **settings(2, 2, memory=True)) as run:
        run.train()
    counters = [e for e in read(tmp_path) if e["ph"] == "C"]
    assert len(counters) == 7
    assert {e["name"] for e in counters} == {"memory of rank 0, bytes"}
    assert {e["args"]["parameters"] for e in counters} == {4}
    assert {e["args"].get("gradients", 0) for e in counters} == {0, 4}


def test_a_step_that_is_not_traced_has_no_more_calls(tmp_path: Path) -> None:
    """Before the trace and after it, in a run whose `log.trace` names other steps."""
    counts: list[list[int]] = []
    for name, trace in (("plain", None), ("traced", {"steps": [5, 5]})):
        (tmp_path / name).mkdir()
        sections = settings(5, 5, 8, trace=trace, every=100)
        with running(Line(), tmp_path / name, **sections) as run:
            data = run.batches()
            counts.append([count_calls(lambda: run.step(next(data))) for _ in range(8)])  # noqa: B023 - called at once
    plain, traced = counts
    assert traced[4] > plain[4] + 50
    assert (traced[1:4], traced[6]) == (plain[1:4], plain[6])


def test_a_stop_in_a_traced_step(tmp_path: Path) -> None:
    """The file is complete, with the steps until then."""
    with pytest.raises(Stopped), running(Line(), tmp_path, **settings(2, 5)) as run:
        train(run, at=3, act=lambda: request_stop("a signal"))
    assert [name for name in phases(read(tmp_path)) if name.startswith("step")] == ["step 2", "step 3"]
    assert [file.name for file in (tmp_path / "trace").iterdir()] == ["rank-0.json.gz"]
    (found,) = read_traces(tmp_path)
    assert (found.first, found.last) == (2, 3)


def test_an_error_in_a_traced_step(tmp_path: Path) -> None:
    """Nothing is written, and the profiler is free again."""
    with pytest.raises(ZeroDivisionError), running(Line(), tmp_path, **settings(2, 5)) as run:
        train(run, at=3, act=lambda: 1 / 0)
    assert not (tmp_path / "trace").exists()
    with profile(activities=[ProfilerActivity.CPU]) as again:
        torch.ones(2).sum()
    assert "aten::sum" in {event.name for event in again.events() or ()}


def test_the_loop_ends_before_the_trace(tmp_path: Path) -> None:
    """What was traced is written."""
    with running(Line(), tmp_path, **settings(2, 5)) as run:
        for batch in run.batches():
            run.step(batch)
            if run.done == 3:
                break
    (found,) = read_traces(tmp_path)
    assert (found.first, found.last) == (2, 2)
    assert [name for name in phases(read(tmp_path)) if name.startswith("step")] == ["step 2", "step 3"]


def test_another_profiler_is_at_work(tmp_path: Path) -> None:
    """Only one can be: that of the user's code stays, and the training says why there is no trace."""
    with profile(activities=[ProfilerActivity.CPU]) as own, running(Line(), tmp_path, **settings(2, 3)) as run:
        run.train()
    assert run.done == 6
    assert noted(tmp_path) == ["another profile is being recorded, and torch has only one; the training goes on"]
    assert "aten::mm" in {event.name for event in own.events() or ()}


def test_a_disk_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The training goes on, and says why there is no trace."""

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(step_trace, "write_trace", fail)
    with running(Line(), tmp_path, **settings(2, 3)) as run:
        run.train()
    assert noted(tmp_path) == [
        "the trace could not be written (OSError: [Errno 28] No space left on device); the training goes on"
    ]
    assert list((tmp_path / "trace").iterdir()) == []


@pytest.mark.parametrize(("first", "last", "traced"), [(3, 5, ["step 5"]), (2, 4, [])])
def test_a_resumed_run(first: int, last: int, traced: list[str], tmp_path: Path) -> None:
    """Steps are numbers of the training: it goes on after step 4, and says so if no step of the trace is left."""
    for name in ("first", "again"):
        (tmp_path / name).mkdir()
    saved = settings(1, 1, 4, trace=None) | {"checkpoint": {"every": 4}}
    with running(Line(), tmp_path / "first", **saved) as run:
        run.train()
    checkpoint = str(tmp_path / "first/checkpoints/step-00000004")
    with running(Line(), tmp_path / "again", **settings(first, last), resume=checkpoint) as run:
        run.train()
    if traced:
        assert [name for name in phases(read(tmp_path / "again")) if name.startswith("step")] == traced
    else:
        assert noted(tmp_path / "again") == ["the run goes on after step 4, and log.trace.steps are [2, 4]"]


def test_epochs_that_end_before_the_trace(tmp_path: Path) -> None:
    """Their steps are known when the data is read."""
    sections = settings(2, 9) | {"train": {"epochs": 2, "optimizer": {"name": "sgd", "lr": 1e-3}}}
    with pytest.raises(ConfigError) as e, running(Line(), tmp_path, **sections) as run:
        run.train()
    assert str(e.value) == (
        "log.trace.steps: [2, 9] ends beyond the last step: train.epochs: 2 are 6 steps; choose steps from 1 to 6, or "
        "leave log.trace out"
    )


def test_a_compiled_model(tmp_path: Path) -> None:
    """Its graphs run as they are, and none is compiled again for the trace."""
    compiled: list[tuple[int, int, int]] = []
    for name, trace in (("plain", None), ("traced", {"steps": [3, 4]})):
        (tmp_path / name).mkdir()
        torch.compiler.reset()
        model = {"compile": {"what": "model", "backend": "eager"}}
        with running(Line(), tmp_path / name, **settings(3, 4, trace=trace), model=model) as run:
            run.train()
            counts = run.work.compiled
            assert counts is not None
            compiled.append((counts.graphs, counts.break_count, counts.recompile_count))
    assert compiled[0] == compiled[1]
    events = read(tmp_path / "traced")
    assert phases(events) == ["step 3", *STEP, "step 4", *STEP]
    assert any("Torch-Compiled Region" in e["name"] for e in events)
