"""Kills for lack of memory and limits of memory, read from files as kernels and containers lay them out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.world import PYTHONPATH_VARIABLE
from unipar.utils.procfs import OomKillCount, count_oom_kills, memory_limit_bytes

GIB = 2**30
MACHINE = {"proc/meminfo": "MemTotal:       33554432 kB\nMemFree: 1 kB\n", "proc/vmstat": "pgfault 8\noom_kill 7\n"}
SECOND = {
    "proc/self/cgroup": "0::/user.slice/job\n",
    "sys/fs/cgroup/memory.stat": "anon 1\n",
    "sys/fs/cgroup/user.slice/memory.max": f"{8 * GIB}\n",
    "sys/fs/cgroup/user.slice/job/memory.max": "max\n",
    "sys/fs/cgroup/user.slice/job/memory.events": "low 0\nhigh 0\nmax 9\noom 4\noom_kill 3\noom_group_kill 0\n",
}
FIRST = {
    "proc/self/cgroup": "9:cpu,cpuacct:/other\n4:memory:/slurm/job_1\n0::/\n",
    "sys/fs/cgroup/memory/slurm/job_1/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
    "sys/fs/cgroup/memory/slurm/job_1/memory.limit_in_bytes": f"{4 * GIB}\n",
    "sys/fs/cgroup/memory/slurm/memory.limit_in_bytes": "9223372036854771712\n",
}
CONTAINER = {  # the path is the host's, and what is mounted is the container's own cgroup
    "proc/self/cgroup": "0::/../../docker/abc\n",
    "sys/fs/cgroup/memory.max": f"{2 * GIB}\n",
    "sys/fs/cgroup/memory.events": "oom 1\noom_kill 1\n",
}
ROOT_ALONE = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cgroup.procs": "1\n"}


@pytest.mark.parametrize(
    ("files", "count", "limit"),
    [
        (SECOND, OomKillCount(3, "in this cgroup"), 8 * GIB),
        (FIRST, OomKillCount(2, "in this cgroup"), 4 * GIB),
        (CONTAINER, OomKillCount(1, "in this cgroup"), 2 * GIB),
        (ROOT_ALONE, OomKillCount(7, "on this machine"), 32 * GIB),
    ],
    ids=["version 2", "version 1", "a container", "no cgroup but the root"],
)
def test_a_kernels_counters_and_limits(tmp_path: Path, files: dict[str, str], count: OomKillCount, limit: int) -> None:
    """The own cgroup counts kills; the lowest limit up to the root holds."""
    for name, text in (MACHINE | files).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="ascii")
    assert count_oom_kills(tmp_path) == count
    assert memory_limit_bytes(tmp_path) == limit


def test_a_kernel_that_counts_nothing(tmp_path: Path) -> None:
    """No counter is no count, not zero."""
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/vmstat").write_text("pgfault 8\n", encoding="ascii")
    assert count_oom_kills(tmp_path) is None


FORK = """
import os
from unipar.utils import procfs
held = bytearray(os.urandom(1)) * (32 << 20)
if os.fork():
    os.wait()
    print("in the parent", procfs.shared_bytes())
else:
    procfs.note_fork()
    before = procfs.shared_bytes()
    for at in range(0, 16 << 20, 4096):
        held[at] = 1
    print("in the fork", before > 32 << 20, round((before - procfs.shared_bytes()) / 2**20), flush=True)
"""


def test_pages_that_a_fork_shares() -> None:
    """They are shared until one side writes to them; a process that is no fork shares nothing."""
    environment = {**os.environ, **PYTHONPATH_VARIABLE}
    done = subprocess.run([sys.executable, "-c", FORK], env=environment, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["in the fork True 16", "in the parent 0"], done.stderr
