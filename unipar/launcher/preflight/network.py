"""Network between machines, measured: ports open both ways, clocks, and an all-reduce."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from statistics import median
from typing import TYPE_CHECKING, Final

from unipar.distributed.meeting.links import listen_for_ranks
from unipar.distributed.meeting.roll_call import wait_for_key
from unipar.errors import WorldMismatch

if TYPE_CHECKING:
    import torch.distributed as dist

    from unipar.distributed.meeting.world_session import Session

SECONDS_TO_CONNECT: Final = 5.0
"""Seconds after which a connection counts as dropped."""

SECONDS_TO_ANSWER: Final = 60.0
"""Seconds that one machine waits for the part of another."""

SECONDS_TO_REDUCE: Final = 30.0
"""Timeout of the all-reduce, and of the connections that it needs."""

SECONDS_TO_GIVE_UP: Final = 3 * SECONDS_TO_REDUCE
"""Seconds after which an all-reduce is given up: where packets are dropped, its library may wait for longer."""

_MOST_IN_FULL: Final = 16
"""Largest number of machines of which each pair is tried."""

_CLOCK_QUESTIONS: Final = 5
_MOST_BYTES: Final = 64 * 2**20
_FIRST_BYTES: Final = 2**20
_SECONDS_OF_TRAFFIC: Final = 2.0
"""Seconds that the largest all-reduce may take, as the first one foretells; a slow network gets a smaller tensor."""


@dataclass(frozen=True)
class NetworkFacts:
    """Measurements that a machine has made together with the others."""

    ports: dict[str, str] = field(default_factory=dict[str, str])
    """Outcome of a connection to each neighbour, by its number: `open`, `no answer`, `refused` or another reason."""

    ahead: float = 0.0
    """Seconds by which its clock is ahead of rank 0's machine."""

    uncertainty: float = 0.0
    """Seconds by which that may be wrong."""

    latency: float | None = None
    """Seconds of an all-reduce of one byte; None: not measured."""

    bandwidth: float | None = None
    """Bytes a second that it sent in a large one."""

    reduced: int = 0
    """Size of that one in bytes."""

    error: str = ""
    """Why the all-reduce failed."""


def neighbours(index: int, number: int) -> list[int]:
    """Return the machines to which one tries to connect: all others, of many those beside it in a ring."""
    reached = range(number) if number <= _MOST_IN_FULL else ((index + 1) % number, (index - 1) % number)
    return sorted({*reached} - {index})


@contextmanager
def open_port(session: Session, key: str) -> Generator[None]:
    """Context manager: this machine listens at a port that the system chose, and says so to the others."""
    index = session.machines.index_of(session.place.rank)
    here = session.machines.all[index]
    with listen_for_ranks(here) as listener:  # the system itself completes connections that nobody accepts
        session.store.set(f"{key}/{index}", str(listener.getsockname()[1]))
        yield


def try_ports(session: Session, key: str) -> dict[str, str]:
    """Return what came of a connection to the open port of each neighbour."""
    machines = session.machines.all
    index = session.machines.index_of(session.place.rank)

    def outcome(other: int) -> str:
        late = f"{machines[index]} waited {SECONDS_TO_ANSWER:g} s for {machines[other]} to open a port"
        port = wait_for_key(session.store, f"{key}/{other}", time.monotonic() + SECONDS_TO_ANSWER, late)
        return _try_port(machines[other].address, int(port))

    others = neighbours(index, len(machines))
    with ThreadPoolExecutor(len(others)) as pool:
        return {str(other): result for other, result in zip(others, pool.map(outcome, others), strict=True)}


def _try_port(address: str, port: int) -> str:
    try:
        socket.create_connection((address, port), timeout=SECONDS_TO_CONNECT).close()
    except TimeoutError:
        return "no answer"
    except ConnectionRefusedError:
        return "refused"
    except OSError as e:
        return e.strerror or str(e)
    return "open"


def compare_clocks(store: dist.Store, index: int, number: int) -> tuple[float, float]:
    """Return the seconds by which this machine's clock is ahead of the first one's, and how wrong that may be."""
    until = time.monotonic() + SECONDS_TO_ANSWER
    if index == 0:
        _tell_time(store, _CLOCK_QUESTIONS * (number - 1), until)
        return 0.0, 0.0
    measured: list[tuple[float, float]] = []
    for _ in range(_CLOCK_QUESTIONS):
        here, began = time.time(), time.monotonic()
        answer = f"answer/{store.add('asked', 1)}"
        while not store.check([answer]):
            if time.monotonic() > until:
                raise WorldMismatch(f"no answer of rank 0's machine within {SECONDS_TO_ANSWER:g} s; has it ended?")
            time.sleep(0.0005)
        half = (time.monotonic() - began) / 2
        measured.append((half, here + half - float(store.get(answer))))
    uncertainty, ahead = min(measured)
    return ahead, uncertainty


def _tell_time(store: dist.Store, questions: int, until: float) -> None:
    answered = 0
    while answered < questions:
        asked = store.add("asked", 0)
        for question in range(answered + 1, asked + 1):
            store.set(f"answer/{question}", repr(time.time()))
        answered = asked
        if time.monotonic() > until:
            raise WorldMismatch(
                f"{answered} of {questions} questions for the time came in {SECONDS_TO_ANSWER:g} s: look into the "
                "other machine's log"
            )
        time.sleep(0.0005)


def measure_all_reduce(store: dist.Store, index: int, number: int, interface: str | None) -> tuple[float, float, int]:
    """Return seconds for one byte, bytes that each machine sends a second, and the largest size.

    Raise RuntimeError if there is no way between two machines. Then a thread may be left, which waits for them.
    """
    result = Future[tuple[float, float, int]]()

    def measure() -> None:
        try:
            result.set_result(_measure_in_group(store, index, number, interface))
        except Exception as e:  # whatever it is, who waits is to know
            result.set_exception(e)

    threading.Thread(target=measure, name="all-reduce", daemon=True).start()
    try:
        return result.result(SECONDS_TO_GIVE_UP)
    except TimeoutError:
        raise RuntimeError(f"no end within {SECONDS_TO_GIVE_UP:g} s") from None


def _measure_in_group(store: dist.Store, index: int, number: int, interface: str | None) -> tuple[float, float, int]:
    import torch.distributed as dist

    if interface is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    with _quiet_stdout():  # gloo writes there how many peers it has
        dist.init_process_group(
            "gloo", store=store, rank=index, world_size=number, timeout=timedelta(seconds=SECONDS_TO_REDUCE)
        )
    return _measure(number)  # the group ends with the process: where another machine has failed, leaving it may hang


def _measure(number: int) -> tuple[float, float, int]:
    import torch
    import torch.distributed as dist

    def seconds(tensor: torch.Tensor) -> float:
        began = time.perf_counter()
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return time.perf_counter() - began

    byte = torch.zeros(1, dtype=torch.uint8)
    seconds(byte)
    latency = median([seconds(byte) for _ in range(20)])
    first = torch.zeros(_FIRST_BYTES, dtype=torch.uint8)
    seconds(first)
    slowest = torch.tensor(seconds(first), dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)  # all machines must choose the same size
    size = int(min(_MOST_BYTES, max(_FIRST_BYTES, _FIRST_BYTES * _SECONDS_OF_TRAFFIC / float(slowest))))
    large = torch.zeros(size, dtype=torch.uint8)
    seconds(large)
    sent = 2 * (number - 1) / number * size
    return latency, sent / min(seconds(large) for _ in range(2)), size


@contextmanager
def _quiet_stdout() -> Generator[None]:
    """Context manager: what libraries write to the standard output goes nowhere."""
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)
