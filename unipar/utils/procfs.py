"""What /proc and cgroups tell: a process's state and start, this process's memory, the machine's."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

STATE, PARENT, GROUP, BEGAN = 0, 1, 2, 19
"""Indices into `process_stat`; BEGAN is in ticks since the machine started: the same number is the same process."""


def process_stat(pid: int | str) -> list[str]:
    """Return the fields of /proc/PID/stat, beginning with the state: those after the command's name, as in proc(5)."""
    return _stat(Path(f"/proc/{pid}/stat"))


def all_process_stats() -> Iterator[list[str]]:
    """Yield the fields of every process that is there, as `process_stat` gives them."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            yield _stat(path)
        except (FileNotFoundError, ProcessLookupError):
            continue


def _stat(path: Path) -> list[str]:
    return path.read_text("utf-8", errors="replace").rpartition(")")[2].split()  # a command's name may hold anything


def process_state(pid: int) -> str:
    """Return R, S, D, T (stopped) or Z, or "" if the process is gone."""
    try:
        return process_stat(pid)[STATE]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def anonymous_memory(key: str = "VmRSS") -> int:
    """Return the bytes of this process that are no pages of files; of `VmHWM` the most so far."""
    rows = _status_fields()
    return (_first_number(rows[key]) - _first_number(rows["RssFile"])) * 1024


_peak_forgotten = [0]
"""The largest peak before the kernel was told to forget it."""


def peak_resident_bytes() -> int:
    """Return the most memory this process ever held, in bytes. (getrusage counts what the parent held at the fork.)"""
    return max(_peak_forgotten[0], _first_number(_status_fields()["VmHWM"]) * 1024)


def reset_resident_peak() -> None:
    """Let `VmHWM` begin anew: from here on it is the most since now."""
    _peak_forgotten[0] = peak_resident_bytes()
    Path("/proc/self/clear_refs").write_text("5", "ascii")


def _status_fields() -> dict[str, str]:
    return dict(line.split(":", 1) for line in Path("/proc/self/status").read_text("ascii").splitlines())


def _first_number(said: str) -> int:
    return int(said.split()[0])


def available_memory_bytes() -> int:
    """Return bytes of free memory: the machine's, or what the control group leaves where that is less."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text("ascii").splitlines())
    machine = int(fields["MemAvailable"].split()[0]) * 1024
    most, used = (Path("/sys/fs/cgroup", name) for name in ("memory.max", "memory.current"))
    if most.exists() and (text := most.read_text("ascii").strip()).isdecimal():
        return min(machine, int(text) - int(used.read_text("ascii")))
    return machine


def memory_left() -> int:
    """Return bytes that this process can still have on the host: what its limit, its group and the machine leave."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return available_memory_bytes()
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])
    return max(0, min(available_memory_bytes(), limit - pages * resource.getpagesize()))


def cores_per_rank(ranks: int) -> int:
    """Return this process's cores divided by the ranks that share them, at least 1."""
    return max(1, len(os.sched_getaffinity(0)) // ranks)
