"""Search for the rank that failed first, if several ended at the same time; and why a rank was killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

import unipar
from tests.support.world import PYTHONPATH_VARIABLE, eventually
from unipar.errors import WorkerFailed
from unipar.launcher.processes import group
from unipar.launcher.processes.postmortem import find_first_failure
from unipar.run_folder.layout import error_path
from unipar.training import out_of_memory
from unipar.utils.procfs import OomKillCount, memory_cgroups

OWN, ECHO = "ValueError: mine", "RuntimeError: Connection reset by peer"
LATE = "RuntimeError: [buffer.cc:78] Timed out waiting 9ms for recv operation to complete"
GONE = "DistNetworkError: Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server crash?"
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
        ({0: (1.0, GONE), 1: (2.0, OWN)}, {0: 1, 1: 1}, 1),
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
        "an error before the loss of the store that it caused, though said later",
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


# Killed by SIGKILL

MIB = 2**20
SIZES = re.compile(r"\d+(\.\d+)? (B|KiB|MiB|GiB)")
KILLED = '''
import os
import signal

import torch
from torch import nn
from torch.utils.data import TensorDataset

import unipar


class Killed(unipar.Task):
    """Rank 1 is killed in the backward of its second step."""

    def __init__(self):
        self.calls = 0

    def model(self):
        return nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 1))

    def data(self):
        return TensorDataset(torch.randn(64, 512, generator=torch.Generator().manual_seed(1)))

    def loss(self, model, batch):
        self.calls += 1
        y = model(batch[0]).square()
        if self.calls == 2 and torch.distributed.get_rank() == 1:
            y.register_hook(lambda grad: os.kill(os.getpid(), signal.SIGKILL))
        return y.mean()
'''


def config_of(folder: Path, **more: Any) -> dict[str, Any]:
    (folder / "killed.py").write_text(KILLED, encoding="utf-8")
    return {
        "task": {"use": f"{folder}/killed.py:Killed"},
        "device": "cpu",
        "parallel": {"data": 2},
        "batch": {"total": 8},
        "train": {"steps": 4},
        "out": str(folder / "out"),
        **more,
    }


@pytest.fixture
def kernel_counts(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let the kernel's counter of kills for lack of memory read these numbers, at the start and after the kill."""

    def count(before: int | None, after: int | None) -> None:
        for module, number in ((group, before), (out_of_memory, after)):
            counted = None if number is None else OomKillCount(number, "in this cgroup")
            monkeypatch.setattr(module, "count_oom_kills", lambda counted=counted: counted)

    return count


@pytest.mark.usefixtures("forked")
def test_a_rank_that_the_kernel_kills(tmp_path: Path, kernel_counts: Callable[..., None]) -> None:
    """The kernel counts it; where the rank was is known by its heartbeat, the rest by an estimate."""
    kernel_counts(2, 3)
    with pytest.raises(WorkerFailed) as e:
        unipar.launch(config_of(tmp_path), quiet=True)
    assert str(e.value) == (
        "rank 1 was killed by SIGKILL in the backward of step 2: probably out of memory: "
        "the kernel killed a process for lack of memory in this cgroup since the start (see dmesg)\n"
        "  by an estimate the largest part was optimizer, 2.0 MiB (parameters 1.0 MiB, gradients 1.0 MiB); by an "
        "estimate batch.micro: 2 instead of 4 or native/optimizer (parameters, gradients and optimizer 3.0 MiB a "
        "rank, here 4.0 MiB) needs less\n"
        f"  its log: {tmp_path}/out/rank-1.log"
    )


def test_a_rank_that_the_kernel_kills_left_an_account(tmp_path: Path, kernel_counts: Callable[..., None]) -> None:
    """With log.memory the last step that logged tells what was held, not an estimate."""
    kernel_counts(0, 2)
    with pytest.raises(WorkerFailed) as e:
        unipar.launch(config_of(tmp_path, log={"memory": True, "every": 1}), quiet=True)
    first, held, _ = str(e.value).splitlines()
    assert first == (
        "rank 1 was killed by SIGKILL in the backward of step 2: probably out of memory: "
        "the kernel killed 2 processes for lack of memory in this cgroup since the start (see dmesg)"
    )
    assert re.match(r"  in step 1 the largest part was [a-z ]+, [\d.]+ MiB \(", held)
    assert re.search(r"\boptimizer,? 2\.0 MiB", held)  # first where temporaries are smaller
    assert "by an estimate the largest" not in held


@pytest.mark.parametrize(
    ("counts", "why"),
    [
        (
            (3, 3),
            "by a person, a scheduler or a time limit; the kernel counted no process killed for lack of memory",
        ),
        ((None, None), "by a person, a scheduler, or the kernel if memory ran out (see dmesg)"),
    ],
    ids=["counted", "not counted"],
)
@pytest.mark.usefixtures("forked")
def test_kill_9_of_a_small_model(
    tmp_path: Path, kernel_counts: Callable[..., None], counts: tuple[int | None, int | None], why: str
) -> None:
    """Memory is not blamed without a reason, and no strategy is named that needs less."""
    kernel_counts(*counts)
    with pytest.raises(WorkerFailed) as e:
        unipar.launch(config_of(tmp_path), quiet=True)
    assert str(e.value) == (
        f"rank 1 was killed by SIGKILL in the backward of step 2, from outside: {why}\n"
        f"  its log: {tmp_path}/out/rank-1.log"
    )


@pytest.mark.parametrize(
    ("counts", "logs"),
    [((3, 3), "the log of systemd-oomd, earlyoom or the scheduler"), ((None, None), "dmesg")],
    ids=["counted", "not counted"],
)
@pytest.mark.usefixtures("forked")
def test_kill_9_of_a_model_that_nearly_fills_the_memory(
    tmp_path: Path,
    kernel_counts: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    counts: tuple[int | None, int | None],
    logs: str,
) -> None:
    """What all ranks keep is more than half of the machine's memory: a reason, whoever sent the signal."""
    kernel_counts(*counts)
    monkeypatch.setattr(out_of_memory, "memory_limit_bytes", lambda: 64 * MIB)
    with pytest.raises(WorkerFailed) as e:
        unipar.launch(config_of(tmp_path), quiet=True)
    first, held, _ = SIZES.sub("SIZE", str(e.value)).splitlines()
    assert first == (
        "rank 1 was killed by SIGKILL in the backward of step 2: probably out of memory: "
        f"by an estimate 2 ranks keep SIZE or more of SIZE (see {logs})"
    )
    assert held.endswith(" needs less")


EATER = """
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import unipar


class Eater(unipar.Task):
    def __init__(self):
        self.eaten = []

    def model(self):
        return nn.Linear(64, 10)

    def data(self):
        return TensorDataset(torch.randn(64, 64))

    def loss(self, model, batch):
        y = model(batch[0]).square().mean()
        while torch.distributed.get_rank() == 1:
            self.eaten.append(torch.ones(4 * 2**20))
        return y


if __name__ == "__main__":
    Path(sys.argv.pop()).write_text("0")
    unipar.launch("eater.json", task=Eater, quiet=True)
"""


@pytest.fixture
def small_cgroup() -> Generator[Path]:
    """Yield a memory cgroup of 2 GiB, version 1 or 2, inside that of this process."""
    parent = next(memory_cgroups(), None)
    if parent is None:
        pytest.skip("there is no memory cgroup here")
    made = parent / f"unipar-test-{os.getpid()}"
    try:
        made.mkdir()
    except OSError as e:
        pytest.skip(f"no memory cgroup can be made here: {e}")
    try:
        limit = next((made / name for name in ("memory.max", "memory.limit_in_bytes") if (made / name).exists()), None)
        if limit is None:
            pytest.skip("the memory controller is not on for cgroups inside this one")
        limit.write_text(str(2 * 2**30), encoding="ascii")
        swap = made / "memory.swap.max"
        if swap.exists():
            swap.write_text("0", encoding="ascii")
        yield made
    finally:
        eventually(lambda: not (made / "cgroup.procs").read_text("ascii").strip(), "processes left in the cgroup")
        made.rmdir()


@pytest.mark.sweep  # tests/comparison/test_failed_strategies.py has such a kill always
def test_the_kernel_really_kills_a_rank(tmp_path: Path, small_cgroup: Path) -> None:
    """A model of 650 parameters whose loss eats all memory of the cgroup: only the kernel's count gives the reason."""
    (tmp_path / "eater.py").write_text(EATER, encoding="utf-8")
    config = config_of(tmp_path) | {"train": {"steps": 2}, "parallel": {"data": 2}}
    del config["task"]
    (tmp_path / "eater.json").write_text(json.dumps(config), encoding="utf-8")
    ended = subprocess.run(
        [sys.executable, "eater.py", str(small_cgroup / "cgroup.procs")],
        cwd=tmp_path,
        env={**os.environ, **PYTHONPATH_VARIABLE},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode != 0
    assert (
        "rank 1 was killed by SIGKILL in the forward of step 1: probably out of memory: "
        "the kernel killed a process for lack of memory in this cgroup since the start (see dmesg)\n"
        "  by an estimate the largest part was optimizer, 5.1 KiB (parameters 2.5 KiB, gradients 2.5 KiB); "
    ) in ended.stderr
