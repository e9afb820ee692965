"""Arguments of a worker, and the ways in which it ends with its parent; used by parent, worker and fork server."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import threading
from dataclasses import dataclass, fields
from typing import Self

PR_SET_PDEATHSIG = 1
PARENT_GONE_EXIT_CODE = 113
"""Exit code of a process whose parent had ended before it could begin."""

_INTEGER_FIELDS = (
    "rank",
    "size",
    "parent",
    "dies_with_thread",
    "parent_alive_fd",
    "listener",
    "local_rank",
    "local_size",
    "port",
    "control",
    "pickled_task_fd",
    "terminal",
)


@dataclass(frozen=True, kw_only=True)
class WorkerArguments:
    """Arguments of one worker, passed on its command line; not in the environment, which its children inherit."""

    rank: int
    size: int
    parent: int
    dies_with_thread: int
    """1: the kernel kills this process when the thread that started it ends, until the pipe below is watched."""

    parent_alive_fd: int
    """The reading end of a pipe whose other end only the parent has: when that closes, the parent has ended."""

    listener: int = -1
    """Rank 0's listening socket; -1 elsewhere."""

    local_rank: int
    """Position among the ranks on this machine."""

    local_size: int
    """Number of ranks on this machine."""

    host: str = "127.0.0.1"
    """Address of rank 0, at which the ranks meet."""

    port: int = 0
    """Port at which the ranks meet; 0 in a world of one."""

    control: int = -1
    """A socket to the parent, or -1."""

    pickled_task_fd: int = -1
    """The reading end of a pipe that brings the pickled task, or -1 if the task is in a file."""

    terminal: int = -1
    """The terminal, which a debugger in this rank reads and writes; -1: it has none."""

    run: str
    entry: str
    """`module:function`, called with the place, the run folder and the control socket."""

    folder: str
    """Temporary folder of this rank, which makes it; the parent removes it."""

    def to_command_line(self) -> list[str]:
        """Return the arguments as words of a command line."""
        return [f"--{f.name}={getattr(self, f.name)}" for f in fields(self)]

    @classmethod
    def read(cls, words: list[str]) -> Self:
        """Return the arguments in the words of a command line."""
        values = dict(word.removeprefix("--").split("=", 1) for word in words)
        numbers = {name: int(values.pop(name)) for name in _INTEGER_FIELDS}
        return cls(**numbers, **values)  # pyright: ignore[reportArgumentType] - the rest is text


def die_with_parent(parent: int, by: signal.Signals | None) -> None:
    """Have the kernel send `by` when the parent's thread ends; end at once if the parent is gone already."""
    if by is not None:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(by), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(PARENT_GONE_EXIT_CODE)


def die_when_pipe_closes(fd: int, folder: str) -> None:
    """Make the temporary folder; when the parent has ended, remove it and kill this process and all that it started."""
    os.set_inheritable(fd, False)
    making = threading.Lock()

    def wait() -> None:
        os.read(fd, 1)
        with making:
            shutil.rmtree(folder, ignore_errors=True)
            os.killpg(0, signal.SIGKILL)

    with making:
        threading.Thread(target=wait, name="lifeline", daemon=True).start()
        os.mkdir(folder, mode=0o700)
