"""What a parent tells a worker, and how a worker dies with its parent. Shared by both sides and the zygote."""

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
"""The exit code of a process whose parent was gone before it could begin."""

_INTEGER_FIELDS = (
    "rank",
    "size",
    "parent",
    "dies_with_thread",
    "parent_alive_fd",
    "listener",
    "port",
    "control",
    "pickled_task_fd",
)


@dataclass(frozen=True, kw_only=True)
class WorkerArguments:
    """Travels as words on the worker's command line: nobody else needs it, so it is not in the environment."""

    rank: int
    size: int
    parent: int
    dies_with_thread: int
    """1: the kernel kills this process when the thread that started it ends, until the lifeline is watched."""

    parent_alive_fd: int
    """The reading end of a pipe whose other end only the parent has: when it closes, the parent is gone."""

    listener: int = -1
    """Rank 0's listening socket; -1 elsewhere."""

    port: int = 0
    """Where the ranks meet on 127.0.0.1; 0 in a world of one."""

    control: int = -1
    """A socket to the parent, or -1."""

    pickled_task_fd: int = -1
    """The reading end of a pipe with what has no file to be found in, or -1."""

    run: str
    entry: str
    """`module:function`, called with the place, the run folder and the control socket."""

    folder: str
    """This rank's temporary folder: it makes it, the parent removes it."""

    def to_command_line(self) -> list[str]:
        return [f"--{f.name}={getattr(self, f.name)}" for f in fields(self)]

    @classmethod
    def read(cls, words: list[str]) -> Self:
        said = dict(word.removeprefix("--").split("=", 1) for word in words)
        numbers = {name: int(said.pop(name)) for name in _INTEGER_FIELDS}
        return cls(**numbers, **said)  # pyright: ignore[reportArgumentType] - the rest is text


def die_with_parent(parent: int, by: signal.Signals | None) -> None:
    """Have the kernel send `by` when the parent's thread ends; end at once if the parent is gone already."""
    if by is not None:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(by), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(PARENT_GONE_EXIT_CODE)


def die_when_pipe_closes(fd: int, folder: str) -> None:
    """Make the temporary folder; when the parent is gone remove it, and end this process and all that it started."""
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
