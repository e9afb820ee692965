"""Workers that an agent starts for a command elsewhere: here both are on one machine, and share no folder.

Comparisons over real machines are in test_across.py.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.world import PYTHONPATH_VARIABLE
from unipar.distributed.meeting.frames import FramedConnection
from unipar.distributed.place import Place
from unipar.distributed.world_machines import WorldMachine
from unipar.errors import NonFinite, Stopped, WorkerFailed, WorldMismatch
from unipar.launcher.processes.group import WorkerGroup
from unipar.launcher.remote.across import AgentAddress, StarterOnMachines
from unipar.launcher.remote.agent import serve_workers
from unipar.run_folder.heartbeat import HeartbeatWriter, read_heartbeat, with_own_clock

WORD = "word"


def answers(place: Place, run: Path, control: socket.socket) -> None:
    """Entry of a worker: answer a message with where it is, what it was given, and what its variable says."""
    question = control.recv(1000)
    (run / f"rank-{place.rank}.said").write_text("written before the answer", encoding="utf-8")
    given = (run / "config.json").read_text("utf-8")
    told = [place.rank, place.size, place.local_rank, place.local_size, given, os.environ["MINE"], question.decode()]
    control.send(json.dumps(told).encode())
    control.recv(1000)


def refuses_there(place: Place, run: Path, control: socket.socket) -> None:
    """Entry of a worker: rank 1 fails."""
    if place.rank == 1:
        raise NonFinite("the loss is not finite at step 3")
    time.sleep(60)


def dies_there(place: Place, run: Path, control: socket.socket) -> None:
    """Entry of a worker: rank 1 is killed."""
    if place.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def beats(place: Place, run: Path, control: socket.socket) -> None:
    """Entry of a worker: sleep until it is asked to stop."""
    heartbeat = HeartbeatWriter(run / f"rank-{place.rank}.beat")
    heartbeat.step = 5
    heartbeat.set_phase("forward")
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: stopped.set())
    stopped.wait(60)
    raise Stopped("stopped by a signal after step 5")


@dataclass
class Agent:
    """An agent in a thread, and the connection of the command that it serves."""

    address: AgentAddress
    command: FramedConnection
    thread: threading.Thread


@pytest.fixture
def agent() -> Generator[Agent]:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    thread = threading.Thread(target=serve_workers, args=(listener, WORD))
    thread.start()
    command = FramedConnection(socket.create_connection(("127.0.0.1", port)))
    command.send({"word": WORD})
    yield Agent(AgentAddress(WorldMachine("node2", "127.0.0.1", (1,)), port, WORD), command, thread)
    with suppress(OSError):
        command.close()
    thread.join(10)
    assert not thread.is_alive()


def group(agent: Agent, run: Path, entry: str, *, control: bool = False) -> WorkerGroup:
    (run / "config.json").write_text("{}", encoding="utf-8")
    starter = StarterOnMachines("127.0.0.1", [agent.address], 5.0)
    own = {**PYTHONPATH_VARIABLE, "MINE": "for workers", "OMP_NUM_THREADS": "1"}
    return WorkerGroup(
        run, 2, f"tests.launcher.remote.test_agent:{entry}", environment=own, control=control, starter=starter
    )


def test_messages_files_and_variables(agent: Agent, tmp_path: Path) -> None:
    """What rank 1 writes on its machine is here when its answer is; it has what the command's folder held."""
    with group(agent, tmp_path, "answers", control=True) as workers:
        workers.send_to_all(b"who?")
        found = [json.loads(message) for message in workers.receive_from_all(30)]
        assert found == [[rank, 2, 0, 1, "{}", "for workers", "who?"] for rank in (0, 1)]
        assert (tmp_path / "rank-1.said").read_text("utf-8") == "written before the answer"
        workers.send_to_all(b"end")
        workers.wait()


def test_an_error_there(agent: Agent, tmp_path: Path) -> None:
    """Its type, its sentence and its traceback come over, as if it had been here."""
    with (
        pytest.raises(NonFinite, match="the loss is not finite at step 3") as e,
        group(agent, tmp_path, "refuses_there") as workers,
    ):
        workers.wait()
    assert isinstance(e.value.__cause__, WorkerFailed)
    assert "refuses_there" in e.value.__cause__.traceback


def test_a_worker_that_is_killed_there(agent: Agent, tmp_path: Path) -> None:
    """Its stand-in ends by the same signal."""
    with (
        pytest.raises(WorkerFailed, match="rank 1 was killed by SIGKILL"),
        group(agent, tmp_path, "dies_there") as workers,
    ):
        workers.wait()


def test_a_signal_and_heartbeats(agent: Agent, tmp_path: Path) -> None:
    """SIGTERM goes on to the worker, which stops by itself; its heartbeat is seen here, in this machine's time."""
    with group(agent, tmp_path, "beats") as workers:
        until = time.monotonic() + 30
        while (beat := read_heartbeat(tmp_path / "rank-1.beat")) is None or beat.step < 5:
            assert time.monotonic() < until
            workers.poll(0.05)
        assert (beat.step, beat.phase) == (5, "forward")
        assert 0 <= time.monotonic() - beat.when < 30
        workers.stop("SIGTERM")
        with pytest.raises(Stopped, match=r"^stopped by SIGTERM after step \d"):
            workers.wait()


def test_an_agent_that_is_lost(agent: Agent, tmp_path: Path) -> None:
    """The rank's error names its machine."""
    starter = StarterOnMachines("127.0.0.1", [AgentAddress(agent.address.machine, 1, WORD)], 5.0)
    (tmp_path / "config.json").touch()
    entry = "tests.launcher.remote.test_agent:refuses_there"
    with (
        pytest.raises(WorkerFailed, match=r"node2 \(127\.0\.0\.1\), rank 1, was lost: .*Connection refused"),
        WorkerGroup(tmp_path, 2, entry, environment=PYTHONPATH_VARIABLE, starter=starter) as workers,
    ):
        workers.wait()


def test_a_stranger_gets_nothing(agent: Agent) -> None:
    """Who does not know the word is sent away."""
    with socket.create_connection(("127.0.0.1", agent.address.port)) as stranger:
        FramedConnection(stranger).send({"word": "other", "arguments": {}})
        assert stranger.recv(1) == b""


@pytest.mark.parametrize(("size", "per", "machines"), [(1, 2, 1), (2, 2, 1), (3, 2, 2), (4, 2, 2)])
def test_machines_are_filled_one_after_another(size: int, per: int, machines: int) -> None:
    """Two machines with room for two ranks each."""
    address = AgentAddress(WorldMachine("node2", "127.0.0.1", (1,)), 1, WORD)
    starter = StarterOnMachines("127.0.0.1", [address], 5.0)
    assert starter.spread(4) == per
    assert starter.machines_of(size) == machines


def test_a_world_that_does_not_fit(agent: Agent, tmp_path: Path) -> None:
    """More ranks than there is room for."""
    starter = StarterOnMachines("127.0.0.1", [agent.address], 5.0)
    starter.spread(2)
    with (
        pytest.raises(WorldMismatch, match=r"^a world of 3 ranks, and 2 machines have room for 2$"),
        WorkerGroup(tmp_path, 3, "x:y", starter=starter),
    ):
        pass


def test_times_of_another_clock() -> None:
    """A heartbeat's time is moved; one without a time, or cut short, stays."""
    work = bytes(24)
    assert with_own_clock(struct.pack("<qqd", 5, 2, 100.0) + work, 7.5) == struct.pack("<qqd", 5, 2, 107.5) + work
    assert with_own_clock(struct.pack("<qqd", 5, 2, 0.0), 7.5) == struct.pack("<qqd", 5, 2, 0.0)
    assert with_own_clock(b"short", 7.5) == b"short"
