"""Real processes with tiny lives: how a group of workers starts, ends, fails as a whole and leaves nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.world import PYTHONPATH_VARIABLE, ROOT, SOON, eventually, is_running, read_pid, short_folder
from unipar.errors import NonFinite, Stopped, WorkerFailed
from unipar.launcher.processes import group
from unipar.launcher.processes.forkserver import ForkServer
from unipar.launcher.processes.group import WorkerGroup, build_worker_environment
from unipar.launcher.processes.process import WorkerProcess
from unipar.launcher.processes.worker_arguments import WorkerArguments

Make = Callable[..., WorkerGroup]
BOTH_WAYS = pytest.mark.parametrize("workers", ["fresh", "forked"], indirect=True)


@pytest.fixture(scope="module")
def server() -> Generator[ForkServer]:
    with ForkServer(["tests.support.entries"], PYTHONPATH_VARIABLE) as ready:
        yield ready


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Generator[Path]:
    """After tmp_path: pytest's own folders are not ours."""
    with short_folder(monkeypatch) as made:
        yield made


@pytest.fixture(params=[pytest.param("fresh", marks=pytest.mark.sweep), "forked"])
def workers(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    """A group of two that runs one of tests/support/entries.py: new interpreters, or forks of a fork server."""

    def make(entry: str, size: int = 2, *, run: Path | None = None, **more: object) -> WorkerGroup:
        starter = request.getfixturevalue("server") if request.param == "forked" else None
        run = run or tmp_path
        return WorkerGroup(
            run,
            size,
            f"tests.support.entries:{entry}",
            environment=PYTHONPATH_VARIABLE,
            starter=starter,
            **more,  # type: ignore[arg-type]
        )

    return make


def failure(workers: WorkerGroup) -> WorkerFailed:
    with pytest.raises(WorkerFailed) as raised, workers:
        workers.wait()
    return raised.value


# Started


@BOTH_WAYS
def test_each_rank_knows_its_place(workers: Make, tmp_path: Path) -> None:
    """Rank and size arrive, threads are shared out, each rank leads a session and has a temporary folder."""
    with workers("fine") as started:
        pids = started.running_pids
        started.wait()
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // 2)))
    for rank in (0, 1):
        said = (tmp_path / f"seen-{rank}").read_text("utf-8")
        assert said.startswith(f"{rank} of 2 ")
        assert f"'OMP': '{threads}'" in said
        assert f"-{rank}'" in said
        assert "'sid': True" in said
    assert not any(is_running(pid) for pid in pids.values())


def test_threads_that_the_user_chose_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """OMP_NUM_THREADS is set only where nobody set it."""
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert build_worker_environment(2, {})["OMP_NUM_THREADS"] == "7"
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert build_worker_environment(10**6, {})["OMP_NUM_THREADS"] == "1"


def test_a_start_that_fails_leaves_nothing_open(tmp_path: Path) -> None:
    """Where the log of a rank cannot be made: sockets, pipes and all."""
    before = set(os.listdir("/proc/self/fd"))
    (tmp_path / "rank-0.log").mkdir()
    workers = WorkerGroup(tmp_path, 2, "tests.support.entries:fine", control=True)
    with pytest.raises(IsADirectoryError) as raised:  # its frames keep alive what nobody closed
        workers.__enter__()
    assert set(os.listdir("/proc/self/fd")) <= before  # what an earlier test has left may be closed meanwhile
    assert raised.value.filename == f"{tmp_path}/rank-0.log"


def test_two_groups_at_once(workers: Make, tmp_path: Path) -> None:
    """Concurrent runs do not meet."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    with workers("fine", run=tmp_path / "a") as first, workers("fine", run=tmp_path / "b") as second:
        first.wait()
        second.wait()
    assert (tmp_path / "a" / "seen-1").exists()
    assert (tmp_path / "b" / "seen-1").exists()


# Failed


@BOTH_WAYS
def test_one_fails_and_all_stop(workers: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first failing rank is named with its error, its own traceback and its log; the others end when asked to."""
    monkeypatch.setattr(group, "SECONDS_TO_END", 600.0)
    began = time.monotonic()
    error = failure(workers("first_raises"))
    sentence, log = str(error).splitlines()
    assert sentence.startswith("rank 1 failed: ValueError: the batch is empty (")
    assert sentence.endswith(", in first_raises)")
    assert log == f"  its log: {tmp_path}/rank-1.log"
    assert error.rank == 1
    assert error.log == f"{tmp_path}/rank-1.log"
    assert error.traceback.endswith("ValueError: the batch is empty\nand more\n")
    assert "in first_raises" in error.traceback
    assert "worker.py" not in error.traceback
    assert time.monotonic() - began < SOON


def test_our_own_errors_keep_their_type(workers: Make) -> None:
    """What a worker raised on purpose arrives as the same class, and the worker's end as its cause."""
    with pytest.raises(NonFinite, match=r"^the loss is not finite at step 3$") as raised, workers("refuses") as started:
        started.wait()
    assert isinstance(raised.value.__cause__, WorkerFailed)


def test_a_strangers_error_under_our_tree(workers: Make) -> None:
    """A class that this process does not know is named by its sentence."""
    assert "failed: Odd: nobody knows this one" in str(failure(workers("unknown")))


def test_an_exit_without_a_word(workers: Make, tmp_path: Path) -> None:
    """Of a rank that left by os._exit there is its code and the last line of its log."""
    error = failure(workers("exits_seven"))
    assert str(error) == (
        "rank 1 ended with exit code 7, without an error of its own\n"
        f"  last in its log: about to go\n  its log: {tmp_path}/rank-1.log"
    )


def test_killed_from_outside(workers: Make) -> None:
    """A rank killed at its start: memory is not blamed."""
    assert str(failure(workers("killed"))).startswith("rank 1 was killed by SIGKILL, from outside: by a person, a ")


def test_a_known_abort_is_explained(workers: Make) -> None:
    """What gloo writes before it aborts becomes what to do."""
    error = str(failure(workers("mismatched")))
    assert error.startswith("rank 0 was killed by SIGABRT\n")
    assert "a parameter is unused on some ranks only: compute it everywhere, times 0.0" in error


def test_who_lost_a_peer_is_not_to_blame(workers: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that says first that its peer is gone waits for that peer's own error."""
    monkeypatch.setattr(group, "SECONDS_FOR_LOST_RANK", SOON)
    assert str(failure(workers("echoes"))).startswith("rank 1 failed: KeyError: 'labels' (")


def test_a_peer_that_ended_too_early(workers: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the lost peer ended well, that is said."""
    monkeypatch.setattr(group, "SECONDS_FOR_LOST_RANK", SOON)
    error = str(failure(workers("ends_early")))
    assert error.startswith("rank 0 failed: RuntimeError: Connection closed by peer")
    assert "rank 1 had ended before it, with exit code 0" in error


def test_a_deaf_rank_is_killed(workers: Make) -> None:
    """Who ignores SIGTERM has three seconds."""
    began = time.monotonic()
    assert str(failure(workers("stubborn"))).startswith("rank 1 failed: ValueError: no (")
    assert 3 <= time.monotonic() - began < SOON


def test_data_workers_end_with_their_rank(workers: Make, tmp_path: Path) -> None:
    """Of the rank that failed, and of the others."""
    failure(workers("with_helpers"))
    assert not is_running(read_pid(tmp_path / "helper-0"))
    assert not is_running(read_pid(tmp_path / "helper-1"))


def test_what_a_good_rank_started_ends_too(workers: Make, tmp_path: Path) -> None:
    """A rank that ends well leaves no process either."""
    with workers("spawns") as started:
        started.wait()
    assert not is_running(read_pid(tmp_path / "helper-0"))


def test_leaving_ends_all(workers: Make, tmp_path: Path) -> None:
    """An error in the body of `with` leaves nothing."""
    pids: dict[int, int] = {}

    def fail() -> None:
        with workers("sleeps") as started:
            pids.update(started.running_pids)
            read_pid(tmp_path / "up-1")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert len(pids) == 2
    assert not any(is_running(pid) for pid in pids.values())


# Asked to stop


@BOTH_WAYS
def test_a_signal_stops_at_a_boundary(workers: Make, tmp_path: Path) -> None:
    """SIGTERM reaches each rank once; the error says how far they came; the handlers are what they were."""
    before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(Stopped, match=r"^stopped by SIGTERM after step \d+; what was logged is in "):
        _interrupted(workers("steps", grace=10), tmp_path, "rank-{}.beat", signal.SIGTERM)
    assert '"event": "stopped"' in (tmp_path / "rank-0.jsonl").read_text("utf-8")
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == before


def test_before_the_first_step(workers: Make, tmp_path: Path) -> None:
    """Ranks that do not listen yet simply end."""
    with pytest.raises(Stopped, match=r"^stopped by SIGINT before the first step; "):
        _interrupted(workers("sleeps"), tmp_path, "up-{}", signal.SIGINT)


def test_a_second_signal_ends_at_once(workers: Make, tmp_path: Path) -> None:
    """However long the grace."""
    began = time.monotonic()
    with pytest.raises(Stopped, match=r"^stopped by SIGINT after step 5; "):
        _interrupted(workers("deaf_steps", grace=60), tmp_path, "rank-{}.beat", signal.SIGINT, signal.SIGINT)
    assert time.monotonic() - began < SOON


def test_grace_ends(workers: Make, tmp_path: Path) -> None:
    """Ranks that reach no boundary in time are killed."""
    began = time.monotonic()
    with pytest.raises(Stopped, match=r"^stopped by SIGTERM after step 5; "):
        _interrupted(workers("deaf_steps", grace=0.5), tmp_path, "rank-{}.beat", signal.SIGTERM)
    assert time.monotonic() - began < SOON


def _interrupted(workers: WorkerGroup, run: Path, sign: str, *signals: signal.Signals) -> None:
    """Wait for the workers, and send this process signals once both ranks have made a sign."""

    def send() -> None:
        signs = [run / sign.format(rank) for rank in (0, 1)]
        eventually(lambda: all(s.exists() and s.stat().st_size > 0 for s in signs), "no rank came up")
        time.sleep(0.1)
        for number in signals:
            os.kill(os.getpid(), number)
            time.sleep(0.2)

    with workers:
        sender = threading.Thread(target=send)
        sender.start()
        try:
            workers.wait()
        finally:
            sender.join()


# Threads and parents


@BOTH_WAYS
def test_workers_outlive_the_thread_that_started_them(workers: Make, tmp_path: Path) -> None:
    """The kernel's parent-death signal follows threads; a notebook's strategy may be one."""
    started = workers("sleeps")
    thread = threading.Thread(target=started.__enter__)
    thread.start()
    thread.join()
    try:
        read_pid(tmp_path / "up-0")
        time.sleep(0.2)
        assert len(started.running_pids) == 2
        assert all(is_running(pid) for pid in started.running_pids.values())
    finally:
        started.kill()


@pytest.mark.parametrize(("in_main", "mortal"), [(True, 1), (False, 0)])
def test_the_kernel_is_asked_in_the_main_thread_only(tmp_path: Path, *, in_main: bool, mortal: int) -> None:
    """Until the lifeline is watched, a worker dies with the thread that started it; other threads may be short."""
    seen: list[int] = []

    class Noted:
        pid, host = 1, "127.0.0.1"

        def start(self, arguments: WorkerArguments, environment: Mapping[str, str], log: int) -> WorkerProcess:
            seen.append(arguments.dies_with_thread)
            raise OSError

    def enter() -> None:
        with pytest.raises(OSError, match=r"^$"):
            WorkerGroup(tmp_path, 1, "x:y", starter=Noted()).__enter__()

    if in_main:
        enter()
    else:
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
    assert seen == [mortal]


def test_a_group_in_a_thread(workers: Make, tmp_path: Path) -> None:
    """Watched from a thread that cannot take signals."""
    ended: list[str] = []

    def run() -> None:
        with workers("fine") as started:
            started.wait()
        ended.append("well")

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(SOON)
    assert ended == ["well"]


PARENT = """
import sys
from pathlib import Path
from unipar.launcher.processes.group import WorkerGroup
with WorkerGroup(Path(sys.argv[1]), 2, "tests.support.entries:with_helpers") as workers:
    workers.wait()
"""


@pytest.mark.parametrize("stopped", [False, True], ids=["", "one-rank-is-stopped"])
def test_workers_die_with_their_parent(tmp_path: Path, *, stopped: bool) -> None:
    """kill -9: ranks, a stopped one too, data workers and temporary folders are gone."""
    (tmp_path / "stay").touch()
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path)], env={**os.environ, **PYTHONPATH_VARIABLE}, cwd=ROOT
    )
    helpers = [read_pid(tmp_path / f"helper-{rank}") for rank in (0, 1)]
    ranks = [os.getpgid(helper) for helper in helpers]
    if stopped:
        os.kill(ranks[0], signal.SIGSTOP)
    parent.kill()
    parent.wait()
    eventually(lambda: not any(is_running(pid) for pid in (*ranks, *helpers)), "something lives on")


# Words


def test_tell_and_hear(workers: Make) -> None:
    """What is told reaches every rank; what is heard comes in the order of ranks."""
    with workers("answers", control=True) as started:
        started.send_to_all(b"a")
        started.send_to_all(b"b")
        assert started.receive_from_all(SOON) == [b"a0", b"a1"]
        assert started.receive_from_all(SOON) == [b"b0", b"b1"]
        with pytest.raises(TimeoutError, match=r"^no answer from rank 0, 1 for 0\.05 s$"):
            started.receive_from_all(0.05)
        started.send_to_all(b"go")
        started.wait()


def test_a_rank_that_ends_says_nothing_more(workers: Make) -> None:
    """Waiting for its word would be for ever."""
    with (
        pytest.raises(WorkerFailed, match=r"^rank \d ended without an answer"),
        workers("mute", control=True) as started,
    ):
        started.receive_from_all()


# With torch


def test_gloo_on_loopback_its_timeout_and_its_abort(tmp_path: Path) -> None:
    """Real groups: one sums and listens on loopback only; in one a rank hangs; in one they reduce different sizes."""
    with ForkServer(["torch", "unipar.distributed.meeting.rendezvous"], PYTHONPATH_VARIABLE) as ready:
        forked: Any = {"environment": PYTHONPATH_VARIABLE, "starter": ready}
        with WorkerGroup(tmp_path, 2, "tests.support.entries:reduces", **forked) as started:
            started.wait()
        assert (tmp_path / "sum-0").read_text("utf-8") == "3.0"
        for rank in (0, 1):
            listens = (tmp_path / f"listens-{rank}").read_text("utf-8").split()
            assert listens
            assert set(listens) == {"127.0.0.1"}
        (tmp_path / "hangs").mkdir()
        hung = failure(WorkerGroup(tmp_path / "hangs", 2, "tests.support.entries:never_reduces", **forked))
        error = failure(WorkerGroup(tmp_path, 2, "tests.support.entries:reduces_unequal", **forked))
    assert str(hung).startswith("rank 1 hung before the first step: rank 0 waited for the others until launch.timeout ")
    assert "compute it everywhere, times 0.0" in str(error)
