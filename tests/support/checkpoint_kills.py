"""Writers of checkpoints that are killed: `python -m tests.support.checkpoint_kills FOLDER TRIALS SEED` prints a table.

Three processes save again and again: rank 0 publishes, ranks 1 and 2 write tensors, and they agree over sockets. One
of them, or all, are killed by SIGKILL: before each operation of the disk (half of a write is an operation), and at
random moments. After each kill every published checkpoint must verify, the last one that was reported as saved must be
there, at most one temporary folder may remain, and the next save must delete it.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.checkpoints import HookedDisk, floats
from unipar.backend import Region
from unipar.checkpoint.format.names import TEMPORARY_PREFIX, TRASH_PREFIX
from unipar.checkpoint.protocol.remote_steps import list_remote_steps
from unipar.checkpoint.protocol.retention import Retention
from unipar.checkpoint.protocol.save_checkpoint import FrozenToSave, PieceToSave, save_checkpoint
from unipar.checkpoint.protocol.verifying import find_checkpoints, list_names, read_manifest, verify_checkpoint
from unipar.checkpoint.storage.disk import Disk, OutputFile
from unipar.checkpoint.storage.remote import RemoteFolder, RemoteOutput
from unipar.distributed.meeting.text_rounds import Decide, Judge
from unipar.utils.address import Address, Location, parse_location

WORLD = 3
WITHIN = 5.0
"""Seconds within which the other ranks must have ended."""

RETENTION = Retention(keep=2)
ELEMENTS = 3000


def _pieces(rank: int, step: int) -> list[PieceToSave]:
    if rank == 0:
        return [PieceToSave("scale", "weight", "F32", (), Region(0, 1), floats(step))]
    data = floats(step) * ELEMENTS
    return [
        PieceToSave("matrix", "weight", "F32", (ELEMENTS // 3, 6), Region(3 * (rank - 1), 3, 6, ELEMENTS // 3), data),
        PieceToSave("matrix", "exp_avg", "F32", (2 * ELEMENTS,), Region(ELEMENTS * (rank - 1), ELEMENTS), data),
    ]


def _frozen(rank: int, step: int) -> FrozenToSave:
    """Return a frozen table of ranks 1 and 2, in a new folder for each step."""
    where, data = Region(ELEMENTS * (rank - 1), ELEMENTS), floats(step) * ELEMENTS
    pieces = [PieceToSave("table", "weight", "F32", (2 * ELEMENTS,), where, data)] if rank else []
    return FrozenToSave(f"frozen-{step:08x}", pieces)


def _send(to: socket.socket, message: bytes) -> None:
    to.sendall(len(message).to_bytes(8, "little") + message)


def _receive(source: socket.socket) -> bytes:
    def exactly(count: int) -> bytes:
        data = b""
        while len(data) < count:
            more = source.recv(count - len(data))
            if not more:
                raise ConnectionError("the other rank is gone")
            data += more
        return data

    return exactly(int.from_bytes(exactly(8), "little"))


def _rounds(rank: int, sockets: Sequence[socket.socket]) -> Decide:
    """Return the collective of a rank: rank 0 has a socket to each other, and tells all what it makes of them."""

    def decide(mine: str, judge: Judge) -> str:
        if rank:
            _send(sockets[0], mine.encode())
            return _receive(sockets[0]).decode()
        told = judge([mine, *(_receive(one).decode() for one in sockets)])
        for one in sockets:
            _send(one, told.encode())
        return told

    return decide


@dataclass(frozen=True)
class Kill:
    """Rank that is killed: before its operation number `operation`, or, with all if `everyone`, after `seconds`."""

    rank: int
    operation: int | None = None
    seconds: float = 0.0
    everyone: bool = False


@contextmanager
def remote_operations(before: Callable[[str, str], None]) -> Generator[None]:
    """Context manager: `before` is called before each request of this process that changes a folder at an address."""
    create, delete, write = RemoteFolder.create, RemoteFolder.delete, RemoteOutput.write
    flush = RemoteOutput.flush

    def creating(self: RemoteFolder, name: str) -> OutputFile:
        before("create", name)
        return create(self, name)

    def writing(self: RemoteOutput, data: memoryview) -> int:
        before("write", self.path.name)
        return write(self, data)

    def flushing(self: RemoteOutput) -> None:
        before("flush", self.path.name)
        flush(self)
        before("after the flush", self.path.name)

    def deleting(self: RemoteFolder, names: Iterable[str]) -> None:
        for name in names:
            before("delete", name)
            delete(self, [name])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RemoteFolder, "create", creating)
        patch.setattr(RemoteFolder, "delete", deleting)
        patch.setattr(RemoteOutput, "write", writing)
        patch.setattr(RemoteOutput, "flush", flushing)
        yield


def _write_forever(
    rank: int, folder: Location, sockets: Sequence[socket.socket], kill: Kill, first: int, told: int
) -> None:
    """Save step after step; rank 0 reports each that is saved."""
    operations = 0

    def before(operation: str, name: str) -> None:
        nonlocal operations
        if operations == kill.operation:
            os.kill(os.getpid(), signal.SIGKILL)
        operations += 1

    counted = ExitStack()  # stays open until this process is killed
    counts = rank == kill.rank and kill.operation is not None
    disk = HookedDisk(before) if counts else Disk()
    if counts and isinstance(folder, Address):
        counted.enter_context(remote_operations(before))
    decide = _rounds(rank, sockets)
    step = first
    while True:
        save_checkpoint(
            folder,
            step,
            _pieces(rank, step),
            {"samples": step},
            rank=rank,
            decide=decide,
            retention=RETENTION,
            disk=disk,
            frozen=_frozen(rank, step),
        )
        if rank == 0:
            os.write(told, step.to_bytes(8, "little"))
        step += 1


def _start(folder: Location, kill: Kill, first: int) -> tuple[list[int], int]:
    """Fork the ranks; return their process ids, and the pipe through which rank 0 reports."""
    pairs = [socket.socketpair() for _ in range(WORLD - 1)]
    reading, writing = os.pipe()
    pids: list[int] = []
    for rank in range(WORLD):
        pid = os.fork()
        if pid == 0:
            try:
                os.close(reading)
                mine = [pairs[rank - 1][1]] if rank else [pair[0] for pair in pairs]
                for pair in pairs:
                    for one in pair:
                        if one not in mine:
                            one.close()
                if rank:
                    os.close(writing)
                _write_forever(rank, folder, mine, kill, first, writing)
            except OSError:
                os._exit(3)  # the other rank is gone
            except BaseException:
                sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
                os._exit(4)
        pids.append(pid)
    os.close(writing)
    for pair in pairs:
        for one in pair:
            one.close()
    return pids, reading


@dataclass
class Outcome:
    """State of the folder after a kill."""

    published: int
    left: str
    faults: list[str] = field(default_factory=list[str])


def play_kill(folder: Location, kill: Kill) -> Outcome:
    """Start writers that go on from the newest checkpoint, kill, and look at what is left."""
    before = find_checkpoints(folder)
    first = before[0].step + 1 if before else 1
    pids, reading = _start(folder, kill, first)
    if kill.operation is None:
        time.sleep(kill.seconds)
        for pid in pids if kill.everyone else [pids[kill.rank]]:
            os.kill(pid, signal.SIGKILL)
    faults = _end(pids, OVER_HTTP.within if _is_over_http(folder) else WITHIN)
    with open(reading, "rb") as pipe:
        told = pipe.read()
    saved = int.from_bytes(told[-8:], "little") if told else first - 1
    found = find_checkpoints(folder)
    for one in found:
        checkpoint = verify_checkpoint(one.path)
        if checkpoint.state["samples"] != one.step:
            faults.append(f"{one.path.name} holds another step")
    if saved and (not found or found[0].step < saved):
        faults.append(f"step {saved} was saved, and is not there")
    if before and not found:
        faults.append("the old checkpoints are gone")
    if isinstance(folder, Address):  # at most one upload that did not end, and one deletion
        temporary, trash = list_remote_steps(folder)[1][-1:], list_remote_steps(folder)[1][:-1]
    else:
        temporary = [name for name in os.listdir(folder) if name.startswith(TEMPORARY_PREFIX)]
        trash = [name for name in os.listdir(folder) if name.startswith(TRASH_PREFIX)]
    if len(temporary) > 1 or len(trash) > 1:
        faults.append(f"left are {temporary + trash}")
    published = found[0].step - first + 1 if found else 0
    left = "temporary" if temporary else "trash" if trash else "nothing else"
    save_checkpoint(
        folder,
        first + published,
        [piece for rank in range(WORLD) for piece in _pieces(rank, first + published)],
        {"samples": first + published},
        retention=RETENTION,
    )
    used = [read_manifest(one.path).folders_beside for one in find_checkpoints(folder)]
    strange = [name for name in {*list_names(folder)}.difference(*used) if not name.startswith("step-")]
    if isinstance(folder, Address):
        strange += list_remote_steps(folder)[1]
    if strange:
        faults.append(f"the next save left {strange}")
    return Outcome(published, left, faults)


def _end(pids: Sequence[int], within: float) -> list[str]:
    """Wait for the ranks; kill those that do not end by themselves, and say so."""
    until, left, faults = time.monotonic() + within, set(pids), list[str]()
    while left:
        for pid in list(left):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                left.remove(pid)
                if os.waitstatus_to_exitcode(status) not in (3, -signal.SIGKILL):
                    faults.append(f"a rank ended with {os.waitstatus_to_exitcode(status)}")
        if left and time.monotonic() > until:
            faults.append(f"{len(left)} ranks did not end within {within:g} s")
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            until = time.monotonic() + within
        time.sleep(0.001)
    return faults


OPERATIONS = (110, 45, 45)
"""Operations of each rank's disk in about three saves, the last of which delete old checkpoints."""


class _Scale(NamedTuple):
    """Length of what is killed."""

    operations: tuple[int, int, int]
    """Operations of each rank among which one is chosen."""

    seconds: float
    """Latest random moment."""

    within: float


OVER_HTTP = _Scale((45, 10, 10), 3.0, 30.0)


def _is_over_http(folder: Location) -> bool:
    return isinstance(folder, Address) and folder.protocol == "s3"


def choose_kills(trials: int, seed: int, scale: _Scale) -> list[tuple[str, Kill]]:
    """Return what to kill, and when: two thirds before an operation, each in turn; the rest at random moments."""
    draw = random.Random(seed)
    orders = [cycle(draw.sample(range(count), count)) for count in scale.operations]
    made: list[tuple[str, Kill]] = []
    for number in range(trials):
        rank = number % WORLD
        if number % 9 < 6:
            made.append((f"rank {rank}, before an operation", Kill(rank, next(orders[rank]))))
        elif number % 9 < 8:
            made.append(("one rank, at any time", Kill(draw.randrange(WORLD), seconds=draw.uniform(0, scale.seconds))))
        else:
            made.append(("all ranks, at any time", Kill(0, seconds=draw.uniform(0, scale.seconds), everyone=True)))
    return made


def play(folder: Location, trials: int, seed: int) -> dict[str, Any]:
    """Play all kills in one folder; return counts by way of killing and by what was left, and all faults."""
    scale = OVER_HTTP if _is_over_http(folder) else _Scale(OPERATIONS, 0.06, WITHIN)
    left: dict[str, Counter[str]] = {}
    faults: list[str] = []
    published, began = 0, time.monotonic()
    for number, (way, kill) in enumerate(choose_kills(trials, seed, scale)):
        outcome = play_kill(folder, kill)
        left.setdefault(way, Counter())[outcome.left] += 1
        published += outcome.published
        faults += [f"trial {number}, {kill}: {fault}" for fault in outcome.faults]
    seconds = time.monotonic() - began
    return {"left": left, "published": published, "faults": faults, "seconds": seconds, "seed": seed}


if __name__ == "__main__":
    place = parse_location(sys.argv[1])
    if isinstance(place, Path):
        place.mkdir(parents=True, exist_ok=True)
    print(json.dumps(play(place, int(sys.argv[2]), int(sys.argv[3]))))
