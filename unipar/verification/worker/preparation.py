"""The task's `prepare` in a verification, whose worlds may run side by side on one machine."""

from __future__ import annotations

import fcntl
import socket
from pathlib import Path

from unipar.task import Task


def prepare_once(task: Task, folder: Path) -> None:
    """Call the task's `prepare`, unless another rank of this machine has done so; `folder` is that of all worlds.

    Ranks wait for the one that calls it: none reads what it is writing.
    """
    if not task.defines("prepare"):
        return
    with (folder / f"prepared-{socket.gethostname()}").open("a+", encoding="utf-8") as done:
        fcntl.flock(done, fcntl.LOCK_EX)
        done.seek(0)
        if not done.read():
            task.prepare()
            done.write("yes\n")
