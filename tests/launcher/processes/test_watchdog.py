"""Detection of the rank that hangs: real processes fall silent in different ways, and one of them is named."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Generator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.world import PYTHONPATH_VARIABLE, SOON, short_folder
from unipar.errors import Hung, WorkerFailed
from unipar.launcher.processes import watchdog
from unipar.launcher.processes.forkserver import ForkServer
from unipar.launcher.processes.group import WorkerGroup
from unipar.launcher.processes.watchdog import HangDetector, parse_innermost_frame
from unipar.run_folder.heartbeat import HeartbeatWriter
from unipar.run_folder.layout import heartbeat_path


@pytest.fixture(scope="module")
def server() -> Generator[ForkServer]:
    with ForkServer(["tests.support.entries"], PYTHONPATH_VARIABLE) as ready:
        yield ready


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank has as long as it needs to write down its stack."""
    monkeypatch.setattr(watchdog, "STACK_DUMP_SECONDS", SOON)


@pytest.fixture
def hung(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, server: ForkServer) -> Generator[Callable[..., Hung]]:
    def watched(entry: str, waits: tuple[str, ...] = (), size: int = 2) -> Hung:
        named = f"tests.support.entries:{entry}"
        workers = WorkerGroup(
            tmp_path, size, named, environment=PYTHONPATH_VARIABLE, heartbeat=0.6, waits=waits, starter=server
        )
        began = time.monotonic()
        with pytest.raises(Hung) as raised, workers:
            workers.wait()
        assert time.monotonic() - began < SOON
        return raised.value

    with short_folder(monkeypatch):
        yield watched


def test_a_rank_that_is_behind(hung: Callable[..., Hung], tmp_path: Path) -> None:
    """Both are silent; the one with fewer steps is named, with the innermost line of its stack."""
    error = hung("sleeps_behind")
    assert error.rank == 1
    assert re.match(r"rank 1 hung in step 3 \(forward\): no sign of life for \d+ s; it is at ", str(error))
    assert str(error).endswith(f"in sleeps_behind\n  its log: {tmp_path}/rank-1.log")
    assert "tests/support/entries.py:" in str(error)
    assert "in sleeps_behind" in error.traceback


def test_a_rank_outside_the_collective(hung: Callable[..., Hung]) -> None:
    """Same step, same phase: the one that does not wait in torch.distributed."""
    error = hung("sleeps_outside")
    assert error.rank == 1
    assert "rank 1 hung in step 3 (backward)" in str(error)


def test_files_in_which_a_library_waits(hung: Callable[..., Hung]) -> None:
    """A backend names its own: then both ranks wait, and no one is blamed."""
    assert hung("sleeps_outside", ("tests/support/entries.py",)).rank is None


def test_a_stopped_rank(hung: Callable[..., Hung]) -> None:
    """SIGSTOP is seen from outside: it cannot answer."""
    error = hung("stops_itself")
    assert error.rank == 0
    assert "rank 0 hung in step 3 (backward): " in str(error)
    assert "; it is stopped (by SIGSTOP or a debugger)\n" in str(error)


def test_nobody_can_be_named(hung: Callable[..., Hung]) -> None:
    """Honest where the evidence is the same for all."""
    error = hung("sleeps_alike")
    assert error.rank is None
    first, *ranks = str(error).splitlines()
    assert re.fullmatch(r"no sign of life for \d+ s; which rank the others wait for is not known", first)
    assert [line.partition(" at ")[0] for line in ranks] == [
        "  rank 0: step 3 (backward),",
        "  rank 1: step 3 (backward),",
    ]


def test_the_collective_that_the_others_wait_in(hung: Callable[..., Hung], tmp_path: Path) -> None:
    """torch's flight recorder knows it, by name, shape, group and number."""
    error = hung("misses_a_sum")
    assert error.rank == 1
    _, _, told = str(error).partition(" in misses_a_sum; ")
    assert told == (
        "rank 0 waits in all_reduce of float [3, 5] (collective 2 of group default_pg), which rank 1 has not begun\n"
        f"  its log: {tmp_path}/rank-1.log"
    )


def test_collectives_of_ranks_that_all_wait(hung: Callable[..., Hung]) -> None:
    """Where nobody can be named, each rank's own tells what does not fit."""
    error = hung("sum_in_two_groups")
    assert error.rank is None
    first, second = (line.partition(", waits")[2] for line in str(error).splitlines()[1:])
    assert (first, second) == (
        " in all_reduce of float [4] (collective 1 of group rows)",
        " in all_reduce of float [5] (collective 1 of group columns)",
    )


def test_who_kept_another_waiting(hung: Callable[..., Hung], tmp_path: Path) -> None:
    """Before the first step only the peers' patience ends: who gave up is not to blame, nor who still waits."""
    error = hung("waits_in_vain", size=4)
    assert error.rank == 1
    assert str(error).startswith(
        "rank 1 hung in step 1 (backward): rank 0 waited for the others until launch.timeout (make it larger if this "
        "may take so long); it is at "
    )
    assert str(error).endswith(f"in waits_in_vain\n  its log: {tmp_path}/rank-1.log")


def test_who_kept_a_device_waiting(hung: Callable[..., Hung]) -> None:
    """NCCL's watchdog ends a process without an error: its log tells."""
    assert str(hung("watchdog")).startswith("rank 1 hung in step 1 (forward): rank 0 waited for the others until ")


def test_a_rank_that_never_begins(tmp_path: Path, server: ForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are as patient with the user's imports as with a collective, also where no heartbeat is watched."""
    workers = WorkerGroup(
        tmp_path, 2, "tests.support.entries:never_begins", environment=PYTHONPATH_VARIABLE, timeout=0.4, starter=server
    )
    with short_folder(monkeypatch), pytest.raises(Hung) as raised, workers:
        workers.wait()
    assert raised.value.rank == 0
    assert str(raised.value).startswith("rank 0 hung before the first step: rank 1 waited for the others until ")
    assert "in never_begins\n" in str(raised.value)


def test_both_wait(tmp_path: Path, server: ForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """In collectives that do not fit each other: the timeout is shown as it is."""
    workers = WorkerGroup(
        tmp_path, 2, "tests.support.entries:both_wait", environment=PYTHONPATH_VARIABLE, starter=server
    )
    with short_folder(monkeypatch), pytest.raises(WorkerFailed) as raised, workers:
        workers.wait()
    first, *rest = str(raised.value).splitlines()
    assert first.startswith("rank 0 failed: RuntimeError: wait timeout after 1000ms, keys: /unipar/1/samples (")
    assert rest == [
        "  it waited for the other ranks until launch.timeout; which of them was late is not known",
        f"  its log: {tmp_path}/rank-0.log",
    ]


def test_silence_that_is_meant(tmp_path: Path, server: ForkServer) -> None:
    """Before step 1 is done, while waiting for a turn and at the end, a rank may be silent for longer."""
    workers = WorkerGroup(
        tmp_path, 1, "tests.support.entries:patient", environment=PYTHONPATH_VARIABLE, heartbeat=0.25, starter=server
    )
    with workers:
        workers.wait()


def test_no_heartbeat_no_deadline(tmp_path: Path) -> None:
    """null means never."""
    watch = HangDetector(tmp_path, None)
    assert watch.every is None
    assert watch.find_hang({0: 1}) is None


def test_a_pause_of_the_whole_machine_is_forgiven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A watcher that was itself asleep knows nothing about the time in between."""
    slept, true = [0.0], time.monotonic
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: true() + slept[0], sleep=time.sleep))
    monkeypatch.setattr(watchdog, "STACK_DUMP_SECONDS", 0.0)
    heartbeat = HeartbeatWriter(heartbeat_path(tmp_path, 0))
    heartbeat.step = 5
    heartbeat.set_phase("forward")
    watch = HangDetector(tmp_path, 1.0)
    nobody = {0: 2**22 + 1}  # no such process: were it asked, it would not answer
    assert watch.find_hang(nobody) is None
    slept[0] += 2.6  # longer than heartbeat, and than a look should take
    assert watch.find_hang(nobody) is None
    slept[0] += 0.7
    assert watch.find_hang(nobody) is None
    slept[0] += 0.7
    assert watch.find_hang(nobody) is not None


def test_the_innermost_frame_of_a_dump() -> None:
    """faulthandler writes all threads; the one that took the signal is the main one."""
    dump = (
        "Thread 0x00007f01 (most recent call first):\n"
        '  File "/lib/threading.py", line 320 in wait\n\n'
        "Current thread 0x00007f02 (most recent call first):\n"
        '  File "/home/me/train.py", line 12 in loss\n'
        '  File "/lib/unipar/loop.py", line 200 in step\n'
    )
    assert str(parse_innermost_frame(dump)) == "/home/me/train.py:12 in loss"
    assert parse_innermost_frame("Current thread 0x1 (most recent call first):\n  <no Python frame>\n") is None
