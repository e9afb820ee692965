"""Process that stands for a worker on another machine: it has its rank's messages, signals, files and exit code.

python -m unipar.launcher.remote.stand_in ARGUMENTS    with the agent's address and word in its environment
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any, Final, NoReturn

from unipar.distributed.meeting.frames import FramedConnection
from unipar.errors import WorkerFailed
from unipar.launcher.processes.worker_arguments import WorkerArguments, die_when_pipe_closes, die_with_parent
from unipar.run_folder.error_file import write_error
from unipar.run_folder.heartbeat import with_own_clock
from unipar.utils.files import whole

AGENT_VARIABLE: Final = "UNIPAR_AGENT"
"""Variable with what a stand-in must know, as JSON: the agent's host, port and word, its machine, and variables."""

_CONNECT_SECONDS: Final = 30.0
_MESSAGE_BYTES: Final = 1 << 17


def stand_for_worker(words: list[str]) -> NoReturn:
    """Have the agent start the worker with these arguments, and be its process here until it ends."""
    arguments = WorkerArguments.read(words)
    die_with_parent(arguments.parent, signal.SIGKILL if arguments.dies_with_thread else None)
    die_when_pipe_closes(arguments.parent_alive_fd, arguments.folder)
    die_with_parent(arguments.parent, signal.SIGCONT)
    request: dict[str, Any] = json.loads(os.environ[AGENT_VARIABLE])
    try:
        code = _run(arguments, request)
    except (OSError, ConnectionError) as e:
        error = WorkerFailed(f"{request['machine']}, rank {arguments.rank}, was lost: {e}")
        write_error(Path(arguments.run), arguments.rank, error)
        os._exit(1)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -code)
    os._exit(code)


def _run(arguments: WorkerArguments, request: Mapping[str, Any]) -> int:
    """Return the worker's exit code, or minus the signal that ended it."""
    run = Path(arguments.run)
    connection = socket.create_connection((request["host"], request["port"]), timeout=_CONNECT_SECONDS)
    framed = FramedConnection(connection)
    framed.set_patience(request["silence"])
    framed.send({"arguments": asdict(arguments), "environment": request["environment"], "word": request["word"]})
    for path in run.iterdir():
        if path.is_file() and not path.name.startswith((".", "rank-")):
            framed.send({"file": path.name}, path.read_bytes())
    framed.send({"file": ""})
    signals, woken = socket.socketpair()
    signals.setblocking(False)
    woken.setblocking(False)
    signal.set_wakeup_fd(woken.fileno())
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, _leave_to_wakeup)
    control = socket.socket(fileno=arguments.control) if arguments.control >= 0 else None
    watched: list[Any] = [framed, signals, *([control] if control is not None else [])]
    while True:
        ready, _, _ = select.select(watched, [], [])
        if signals in ready:
            for number in signals.recv(64):
                framed.send({"signal": number})
        if control is not None and control in ready:
            received = control.recv(_MESSAGE_BYTES)
            if received:
                framed.send({"control": True}, received)
            else:
                watched.remove(control)
        for message, content in framed.receive_all() if framed in ready else ():
            if "exit" in message:
                return int(message["exit"])
            if "file" in message:
                _write(run, message, content)
            elif control is not None:
                control.send(content)


def _leave_to_wakeup(number: int, frame: FrameType | None) -> None:
    """Do nothing: the signal's number is read from the wakeup socket."""


def _write(run: Path, message: Mapping[str, Any], content: bytes) -> None:
    """Write a file of the worker here; times of a heartbeat are of the other machine's clock."""
    name = Path(message["file"]).name
    if name.endswith(".beat"):
        content = with_own_clock(content, time.monotonic() - message["now"])
    with whole(run / name) as path:
        path.write_bytes(content)


if __name__ == "__main__":
    stand_for_worker(sys.argv[1:])
