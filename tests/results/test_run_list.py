"""The list of runs: state, progress and size of everything in a folder, whatever its processes have left there."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.comparisons import write_example_comparison
from tests.support.observations import UNEQUAL, observed_rank, write_observation
from tests.support.run_folders import EVENTS, plain, wrote
from tests.support.world import PYTHONPATH_VARIABLE, eventually
from unipar.errors import ReportError, Stopped, WorkerFailed
from unipar.results.run_list import RunEntry, list_runs
from unipar.run_folder.error_file import record_run_error, write_error
from unipar.run_folder.folder import lock_folder
from unipar.run_folder.heartbeat import HeartbeatWriter
from unipar.run_folder.layout import heartbeat_path
from unipar.utils.procfs import boot_id, process_state

UNFINISHED = EVENTS[:4]


def only(folder: Path) -> RunEntry:
    (entry,) = list_runs(folder)
    return entry


def begun(run: Path, **launched: Any) -> Path:
    """A run whose end is in no file."""
    plain(run, **launched)
    wrote(run, 0, UNFINISHED)
    wrote(run, 1, EVENTS[:1])
    return run


def fails(run: Path, error: BaseException) -> None:
    with pytest.raises(type(error)), record_run_error(run):
        raise error


def test_a_run_that_ended(tmp_path: Path) -> None:
    """What it was, how far it came, how long it took, what it takes on disk."""
    plain(tmp_path / "x")
    (tmp_path / "x/rank-0.log").write_bytes(b"x" * 100_000)
    entry = only(tmp_path)
    assert (entry.name, entry.folder, entry.kind) == ("x", f"{tmp_path}/x", "run")
    assert (entry.strategy, entry.ranks, entry.steps, entry.of, entry.loss) == ("native/nothing", 2, 12, 12, 3.25)
    assert (entry.state, entry.why, entry.started, entry.seconds) == ("ended", "", 100.0, 6.0)
    assert entry.size == sum(file.stat().st_blocks * 512 for file in (tmp_path / "x").iterdir()) >= 100_000


def test_what_its_last_logged_step_did(tmp_path: Path) -> None:
    """By the names in the run log; nothing where older run logs do not say."""
    run = plain(tmp_path / "x")
    assert only(tmp_path).speed == {}
    did = {"samples_per_second": 40.0, "tokens_per_second": 2560.0, "mfu": 0.25, "waiting": 0.1}
    wrote(run, 0, [*EVENTS[:3], {**EVENTS[3], **did}, *EVENTS[4:]])
    assert only(tmp_path).speed == did


def test_a_run_that_trains(tmp_path: Path) -> None:
    """While its folder is locked it is running; the heartbeat knows of steps that are not logged yet."""
    run = begun(tmp_path / "x")
    heartbeat = HeartbeatWriter(heartbeat_path(run, 0))
    heartbeat.step = 11
    for phase, done in (("backward", 10), ("between", 11)):
        heartbeat.set_phase(phase)
        with lock_folder(run):
            entry = only(tmp_path)
        assert (entry.state, entry.why, entry.steps, entry.of) == ("running", "", done, 12)
    assert entry.seconds is not None
    assert abs(time.time() - 100 - entry.seconds) < 60


def test_a_run_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run is running, and silent for longer than `launch.heartbeat`: how long, and where, is said."""
    run = begun(tmp_path / "x", boot=boot_id())
    (run / "config.json").write_text('{"batch": {}, "train": {}, "launch": {"heartbeat": 60.0}}', "utf-8")
    heartbeat = HeartbeatWriter(heartbeat_path(run, 0))
    heartbeat.step = 11
    heartbeat.set_phase("backward")
    now = time.monotonic()
    for later, why in ((30, ""), (130, "no sign of life for 2:10, in the backward of step 11")):
        monkeypatch.setattr(time, "monotonic", partial(float, now + later))
        with lock_folder(run):
            assert (only(tmp_path).state, only(tmp_path).why) == ("running", why)


HOLD = """
import sys, time
from pathlib import Path
from unipar.run_folder.folder import lock_folder
with lock_folder(Path(sys.argv[1])):
    print("locked", flush=True)
    time.sleep(600)
"""


def test_a_run_that_was_killed(tmp_path: Path) -> None:
    """kill -9 leaves no word: the lock is gone with the process, and the heartbeat says where it was."""
    run = begun(tmp_path / "x")
    heartbeat = HeartbeatWriter(heartbeat_path(run, 0))
    heartbeat.step = 11
    heartbeat.set_phase("backward")
    command = [sys.executable, "-c", HOLD, str(run)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, **PYTHONPATH_VARIABLE}) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"locked\n"
        assert only(tmp_path).state == "running"
        process.send_signal(signal.SIGKILL)
    eventually(lambda: only(tmp_path).state == "died", "it is still locked")
    entry = only(tmp_path)
    assert entry.why == "no process of it is left; rank 0 was last seen in the backward of step 11"
    assert entry.steps == 10
    (run / "rank-0.beat").unlink()
    assert only(tmp_path).why == "no process of it is left; it had not begun to train"


def test_a_run_on_another_machine(tmp_path: Path) -> None:
    """Its lock may not be seen from here: it runs as long as it writes."""
    run = begun(tmp_path / "x", boot="of another machine")
    assert only(tmp_path).state == "running"
    for file in run.iterdir():
        os.utime(file, (1000.0, 1000.0))
    entry = only(tmp_path)
    assert (entry.state, entry.why) == (
        "died",
        "no process of it is left on this machine, and nothing was written lately from another; "
        "it had not begun to train",
    )
    begun(run, boot=boot_id())
    assert only(tmp_path).state == "died"


def test_a_run_that_failed(tmp_path: Path) -> None:
    """With the sentence that `launch` raised; else with the first error of a rank, not with what followed from it."""
    run = begun(tmp_path / "x")
    write_error(run, 1, ArithmeticError("no loss here\nnor there"))
    write_error(run, 0, Stopped("stopped by a signal after step 2"))
    assert (only(tmp_path).state, only(tmp_path).why) == ("failed", "rank 1 failed: ArithmeticError: no loss here")
    fails(run, WorkerFailed("rank 1 was killed by SIGKILL in the backward of step 2\n  its log: x"))
    entry = only(tmp_path)
    assert (entry.state, entry.why) == ("failed", "rank 1 was killed by SIGKILL in the backward of step 2")
    assert entry.seconds is not None
    assert abs(time.time() - 100 - entry.seconds) < 60  # up to the error
    other = begun(tmp_path / "y")
    fails(other, KeyError("labels"))
    at = "(tests/results/test_run_list.py:49, in fails)"
    assert [entry.why for entry in list_runs(tmp_path)] == [entry.why, f"KeyError: 'labels' {at}"]


@pytest.mark.parametrize("by", ["parent", "rank", "run_log", "keyboard"])
def test_a_run_that_was_stopped(by: str, tmp_path: Path) -> None:
    """By whoever was told to stop, and at which step."""
    run = begun(tmp_path / "x")
    sentence = "stopped by a signal after step 10"
    if by == "parent":
        fails(run, Stopped(sentence))
    elif by == "rank":
        write_error(run, 1, Stopped(sentence))
    elif by == "run_log":
        wrote(run, 0, [*UNFINISHED, {"event": "stopped", "time": 105.0, "step": 10}])
    else:
        fails(run, KeyboardInterrupt())
        sentence = "KeyboardInterrupt"
    entry = only(tmp_path)
    assert (entry.state, entry.why, entry.steps) == ("stopped", sentence, 10)


def test_a_run_that_has_just_begun(tmp_path: Path) -> None:
    """Before the first event it is known from what was settled; a claimed folder, from nothing yet."""
    run = tmp_path / "x"
    run.mkdir()
    (run / "config.json").touch()
    with lock_folder(run):
        entry = only(tmp_path)
    assert (entry.state, entry.strategy, entry.ranks, entry.steps, entry.loss) == ("running", "", None, 0, None)
    settled = {"strategy": "deepspeed/optimizer", "sizes": {"ranks": 4}}
    (run / "config.json").write_text('{"batch": {}, "train": {"steps": 7}}', "utf-8")
    (run / "launch.json").write_text(json.dumps({"task": {}, "settled": settled}), "utf-8")
    entry = only(tmp_path)
    assert (entry.state, entry.strategy, entry.ranks, entry.steps, entry.of) == ("died", "deepspeed/optimizer", 4, 0, 7)


def test_a_long_run_log(tmp_path: Path) -> None:
    """The last loss is found below a million bytes of other events, and an unfinished line is left out."""
    run = plain(tmp_path / "x")
    rows = [*UNFINISHED, *({"event": "log", "time": 104.0, "step": 10, "note": "n" * 100} for _ in range(10_000))]
    wrote(run, 0, rows)
    with (run / "rank-0.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"event": "step", "step": 11, "lo')
    entry = only(tmp_path)
    assert (entry.strategy, entry.steps, entry.loss) == ("native/nothing", 10, 3.25)


@pytest.mark.parametrize(
    ("file", "content", "why"),
    [
        ("rank-0.jsonl", "[1]\n", "{run}/rank-0.jsonl cannot be read as a rank's run log: one of its lines is not an"),
        ("launch.json", '{"task"', "{run}/launch.json cannot be read: it is truncated or not JSON ("),
        ("config.json", "[]", "{run}/config.json is not a config of a run: it holds no mapping"),
        ("rank-0.error.json", '{"kind": 3}', "a file in {run} was not written by unipar (TypeError: "),
        ("rank-0.beat", b"\x7f" * 24, "a file in {run} was not written by unipar (IndexError: "),
    ],
)
def test_a_broken_run_is_one_line(file: str, content: str | bytes, why: str, tmp_path: Path) -> None:
    """The others are listed; it says which file it is."""
    plain(tmp_path / "well")
    run = begun(tmp_path / "broken")
    (run / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    found = {entry.name: entry for entry in list_runs(tmp_path)}
    assert found["well"].state == "ended"
    assert found["broken"].state == "unreadable"
    assert found["broken"].why.startswith(why.format(run=run))


def test_other_results(tmp_path: Path) -> None:
    """Comparisons, scalings and verifications have rows of their own; a run's size is without them."""
    plain(tmp_path / "x")
    write_example_comparison(tmp_path / "x")
    (tmp_path / "x/verify").mkdir()
    strategies = [{"strategy": "native/nothing", "outcome": "agrees", "losses": [1.0] * 10}]
    strategies += [{"strategy": "horovod/nothing", "outcome": "disagrees", "losses": [1.0] * 10}]
    verified = {"ranks": 2, "interrupted": False, "stopped": "", "strategies": strategies}
    (tmp_path / "x/verify/verify.json").write_text(json.dumps(verified), "utf-8")
    worlds = [{"strategy": "native/nothing", "ranks": n, "outcome": "waits", "losses": []} for n in (1, 2)]
    (tmp_path / "x/scale").mkdir()
    (tmp_path / "x/scale/scale.json").write_text(json.dumps({"worlds": worlds}), "utf-8")
    (tmp_path / "deep/er").mkdir(parents=True)
    plain(tmp_path / "deep/er/y")
    plain(tmp_path / ".hidden")
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text('{"model_type": "gpt2"}', "utf-8")
    found = {entry.name: entry for entry in list_runs(tmp_path)}
    assert {name: (entry.kind, entry.state) for name, entry in found.items()} == {
        "x": ("run", "ended"),
        "x/compare": ("comparison", "ended"),
        "x/verify": ("verification", "failed"),
        "x/scale": ("scaling", "died"),
        "deep/er/y": ("run", "ended"),
    }
    compared, verification, scaled = found["x/compare"], found["x/verify"], found["x/scale"]
    assert (compared.strategy, compared.ranks, compared.loss, compared.seconds) == ("7 strategies", 2, None, None)
    assert (verification.strategy, verification.steps, verification.why) == (
        "2 strategies",
        10,
        "horovod/nothing disagreed",
    )
    assert (scaled.strategy, scaled.ranks) == ("1 strategy", 2)
    assert scaled.why == "2 of 2 did not run; the same command goes on"
    assert found["x"].size == sum(file.stat().st_blocks * 512 for file in (tmp_path / "x").glob("*.json*"))
    with lock_folder(tmp_path / "x/scale"):
        assert {entry.name: entry.state for entry in list_runs(tmp_path)}["x/scale"] == "running"


def test_the_order_is_that_of_the_start(tmp_path: Path) -> None:
    """The latest one is last, whatever its name."""
    for name, began in (("a", 300.0), ("b", 100.0), ("c", 200.0)):
        wrote(plain(tmp_path / name), 0, [{**EVENTS[0], "time": began}])
    assert [entry.name for entry in list_runs(tmp_path)] == ["b", "c", "a"]
    assert [entry.name for entry in list_runs(tmp_path / "a")] == ["a"]


def test_no_folder(tmp_path: Path) -> None:
    """The way out is in the sentence."""
    with pytest.raises(ReportError) as e:
        list_runs(tmp_path / "runs")
    assert str(e.value) == (
        f"{tmp_path}/runs does not exist: train first (unipar run FILE), or name a folder with runs"
    )


def test_a_run_that_went_on(tmp_path: Path) -> None:
    """Strategy and ranks are those of its last attempt; how many there were is said; a deadline is named."""
    run = plain(tmp_path / "x", settled={"strategy": "deepspeed/parameters"}, ranks=4)
    (run / "attempts.jsonl").write_text(json.dumps({"config.json": {}, "launch.json": {}}) + "\n", "utf-8")
    entry = only(tmp_path)
    assert (entry.strategy, entry.ranks, entry.state, entry.why) == (
        "deepspeed/parameters",
        4,
        "ended",
        "in 2 attempts",
    )
    wrote(run, 0, [*UNFINISHED, {"event": "stopped", "time": 105.0, "step": 11, "why": "launch.deadline"}])
    entry = only(tmp_path)
    assert (entry.state, entry.why) == ("stopped", "stopped by launch.deadline after step 11")


def test_observed_commands(tmp_path: Path) -> None:
    """An observed command is listed as one, whatever it ended with; while one of its processes is alive it runs."""
    write_observation(tmp_path / "fine")
    write_observation(tmp_path / "faulty", findings=(UNEQUAL,))
    write_observation(tmp_path / "failed", exit_code=3)
    write_observation(tmp_path / "stopped", exit_code=-15)
    write_observation(tmp_path / "gone", [observed_rank(host=socket.gethostname(), pid=2**22 + 1)], ended=False)
    here = observed_rank(host=socket.gethostname(), pid=os.getpid())
    write_observation(tmp_path / "alive", [here], ended=False)
    write_observation(tmp_path / "elsewhere", ended=False)
    with subprocess.Popen([sys.executable, "-c", ""]) as dead:  # nobody has waited for it yet
        eventually(lambda: process_state(dead.pid) == "Z", "the process has not ended")
        zombie = write_observation(tmp_path / "zombie", [here.model_copy(update={"pid": dead.pid})], ended=False)
        assert only(zombie).state == "died"
    shutil.rmtree(zombie)
    found = {entry.name: entry for entry in list_runs(tmp_path)}
    assert {entry.kind for entry in found.values()} == {"observation"}
    assert {name: (entry.state, entry.why) for name, entry in found.items()} == {
        "fine": ("ended", ""),
        "faulty": ("ended", "1 fault"),
        "failed": ("failed", "the command failed with exit code 3"),
        "stopped": ("stopped", "the command was ended by SIGTERM"),
        "gone": ("died", "no process of it is left, and `unipar observe` has not ended; no observed.json was written"),
        "alive": ("running", ""),
        "elsewhere": ("running", ""),
    }
    fine = found["fine"]
    assert (fine.strategy, fine.ranks, fine.steps, fine.loss) == ("observed: DDP", 2, 12, 3.25)
    assert (fine.started, fine.seconds) == (100.0, 13.0)
    for file in (tmp_path / "elsewhere").iterdir():
        os.utime(file, (1e9, 1e9))
    assert {entry.name: entry.state for entry in list_runs(tmp_path)}["elsewhere"] == "died"
    for file in (tmp_path / "fine").glob("*.observed.json"):
        file.unlink()
    broken = {entry.name: entry for entry in list_runs(tmp_path)}["fine"]
    assert (broken.kind, broken.state) == ("observation", "unreadable")
    assert broken.why == f"{tmp_path}/fine holds observed.json and nothing of a rank"
