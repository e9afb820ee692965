"""Worlds over several machines that one command starts, one after another: `compare`, `scale` and `verify`."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, final

from unipar.config import Config
from unipar.distributed.meeting.frames import FramedConnection
from unipar.distributed.meeting.links import listen_for_ranks
from unipar.distributed.meeting.roll_call import wait_for_key
from unipar.distributed.place import Place
from unipar.errors import WorldMismatch
from unipar.launcher.processes.process import ChildProcess, SubprocessStarter, WorkerProcess
from unipar.launcher.processes.worker_arguments import WorkerArguments
from unipar.launcher.remote.agent import serve_workers
from unipar.launcher.remote.stand_in import AGENT_VARIABLE

if TYPE_CHECKING:
    from unipar.distributed.meeting.world_session import Session
    from unipar.distributed.world_machines import WorldMachine

_SECONDS_TO_CONNECT: Final = 30.0


@dataclass(frozen=True)
class AgentAddress:
    """Address of a machine's agent, and the word that it wants to hear."""

    machine: WorldMachine
    port: int
    word: str


@final
class StarterOnMachines:
    """Starter of workers that fills one machine after another; each one elsewhere has a process that stands for it."""

    def __init__(self, host: str, agents: list[AgentAddress], silence: float) -> None:
        self._host, self._agents, self._silence = host, agents, silence
        self.per: int | None = None
        """Most ranks on a machine; None: those of each world, divided by the machines."""

    @property
    def pid(self) -> int:
        return os.getpid()

    @property
    def host(self) -> str:
        return self._host

    @property
    def number(self) -> int:
        """Number of machines."""
        return 1 + len(self._agents)

    def machines_of(self, size: int) -> int:
        """Return the number of machines of a world with this many ranks."""
        return -(-size // self._per(size))

    def _per(self, size: int) -> int:
        return self.per or -(-size // self.number)

    def spread(self, widest: int) -> int:
        """Have each machine filled as the largest world needs it; return the ranks on a machine then."""
        self.per = -(-widest // self.number)
        return self.per

    def start(self, arguments: WorkerArguments, environment: Mapping[str, str], log: int) -> WorkerProcess:
        """Start one worker on its machine."""
        if arguments.size > (most := self._per(arguments.size) * self.number):
            raise WorldMismatch(f"a world of {arguments.size} ranks, and {self.number} machines have room for {most}")
        index, local = divmod(arguments.rank, self._per(arguments.size))
        here = min(self._per(arguments.size), arguments.size - index * self._per(arguments.size))
        arguments = replace(arguments, local_rank=local, local_size=here)
        if index == 0:
            return SubprocessStarter().start(arguments, environment, log)
        if arguments.pickled_task_fd >= 0:
            raise WorldMismatch(
                "the task's code is in no file, so that other machines cannot load it: put it into a file that each of "
                "them has"
            )
        return self._start_stand_in(self._agents[index - 1], arguments, environment, log)

    def _start_stand_in(
        self, agent: AgentAddress, arguments: WorkerArguments, environment: Mapping[str, str], log: int
    ) -> WorkerProcess:
        changed = {name: value for name, value in environment.items() if os.environ.get(name) != value}
        request = {
            "host": agent.machine.address,
            "port": agent.port,
            "word": agent.word,
            "machine": str(agent.machine),
            "environment": changed,
            "silence": self._silence,
        }
        popen = subprocess.Popen(
            [sys.executable, "-P", "-m", "unipar.launcher.remote.stand_in", *arguments.to_command_line()],
            env={**os.environ, AGENT_VARIABLE: json.dumps(request)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[fd for fd in (arguments.parent_alive_fd, arguments.control) if fd >= 0],
            start_new_session=True,
        )
        return ChildProcess(popen)


@contextmanager
def starter_on_machines(config: Config, place: Place | None) -> Generator[StarterOnMachines | None]:
    """Context manager: the starter of workers on all machines of the launcher that started this process.

    None if there is but this one. It is yielded on rank 0's machine alone: on each other one this process serves, and
    exits when rank 0's is done.
    """
    if place is None or not place.several_machines:
        yield None
        return
    from unipar.backend.joining import join_session

    session = join_session(config, place)
    name, rank = f"agents/{session.next_launch()}", place.rank
    if rank:
        if session.machines.leads(rank):
            _serve(session, name)
        raise SystemExit(0)
    with ExitStack() as stack:
        agents = [_connect(session, f"{name}/{index}", index, stack) for index in range(1, len(session.machines.all))]
        silence = config.launch.heartbeat or config.launch.timeout
        yield StarterOnMachines(session.machines.all[0].address, agents, silence)


def _serve(session: Session, name: str) -> None:
    """Serve as the agent of this machine until rank 0's process is done."""
    index = session.machines.index_of(session.place.rank)
    listener = listen_for_ranks(session.machines.all[index])
    word = secrets.token_hex(16)
    session.store.set(f"{name}/{index}", f"{listener.getsockname()[1]} {word}")
    serve_workers(listener, word)


def _connect(session: Session, key: str, index: int, stack: ExitStack) -> AgentAddress:
    """Return the address of a machine's agent, to which this process is connected from now on."""
    machine = session.machines.all[index]
    late = f"the process on {machine} did not begin to serve within {_SECONDS_TO_CONNECT:g} s; its log may say why"
    port, word = wait_for_key(session.store, key, time.monotonic() + _SECONDS_TO_CONNECT, late).split()
    try:
        connection = socket.create_connection((machine.address, int(port)), timeout=_SECONDS_TO_CONNECT)
    except OSError as e:
        raise WorldMismatch(
            f"{session.machines.all[0]} cannot connect to {machine} at port {port} ({e.strerror or e}); "
            "open that port in the firewall between them, or set machines.interface"
        ) from None
    connection.settimeout(None)
    framed = FramedConnection(connection)
    stack.callback(framed.close)
    framed.send({"word": word})
    return AgentAddress(machine, int(port), word)
