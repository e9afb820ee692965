"""Search for the rank that failed first, if several ended at the same time."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from unipar.errors import WorkerFailed
from unipar.launcher.processes.postmortem import find_first_failure
from unipar.run_folder.layout import error_path

OWN, ECHO = "ValueError: mine", "RuntimeError: Connection reset by peer"
LATE = "RuntimeError: [buffer.cc:78] Timed out waiting 9ms for recv operation to complete"
ABORT, KILL = -int(signal.SIGABRT), -int(signal.SIGKILL)


@pytest.mark.parametrize(
    ("said", "ended", "blamed"),
    [
        ({0: (2.0, OWN), 1: (1.0, OWN)}, {0: 1, 1: 1}, 1),
        ({0: (1.0, OWN)}, {1: ABORT, 0: 1}, 0),
        ({0: (1.0, ECHO)}, {0: 1, 1: 7}, 1),
        ({0: (1.0, ECHO)}, {0: 1, 1: ABORT}, 1),
        ({0: (1.0, OWN)}, {0: 1, 1: KILL}, 1),
        ({0: (1.0, ECHO), 1: (2.0, OWN)}, {0: 1, 1: 1}, 1),
        ({0: (1.0, LATE), 1: (2.0, OWN)}, {0: 1, 1: 1}, 1),
        ({0: (1.0, OWN)}, {1: 7}, 1),
        ({}, {0: 3, 1: KILL}, 1),
    ],
    ids=[
        "the earlier of two errors",
        "an error before an abort that followed it",
        "a silent exit before the loss that it caused",
        "an abort before the loss that it caused",
        "a kill before what it led to",
        "an error before the loss that it caused, though said later",
        "an error before the timeout that it caused",
        "one that ended before one that still runs",
        "a kill before an exit",
    ],
)
def test_who_was_first(tmp_path: Path, said: dict[int, tuple[float, str]], ended: dict[int, int], blamed: int) -> None:
    """By what they wrote down and how they ended."""
    for rank, (time, line) in said.items():
        kind, _, message = line.partition(": ")
        row = {"time": time, "kind": kind, "message": message, "traceback": line}
        error_path(tmp_path, rank).write_text(json.dumps(row), encoding="utf-8")
    error = find_first_failure(tmp_path, 2, ended)
    assert isinstance(error, WorkerFailed)
    assert error.rank == blamed
