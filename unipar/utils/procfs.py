"""Facts from /proc and cgroups: state and start of a process, memory of this process and of the machine."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

STATE, PARENT, GROUP, BEGAN = 0, 1, 2, 19
"""Indices into `process_stat`. BEGAN, the start in ticks since boot, tells a process from a later one with its PID."""


def process_stat(pid: int | str) -> list[str]:
    """Return the fields of /proc/PID/stat (see proc(5)) that follow the command's name; the first is the state."""
    return _stat(Path(f"/proc/{pid}/stat"))


def all_process_stats() -> Iterator[list[str]]:
    """Yield the fields of every running process, in the form of `process_stat`."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            yield _stat(path)
        except (FileNotFoundError, ProcessLookupError):
            continue


def _stat(path: Path) -> list[str]:
    # the command's name may contain blanks and brackets, so the fields begin after the last bracket
    return path.read_text("utf-8", errors="replace").rpartition(")")[2].split()


def process_state(pid: int) -> str:
    """Return the state of a process as a letter of proc(5), such as R, S, D, T or Z, or "" if it has ended."""
    try:
        return process_stat(pid)[STATE]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def boot_id() -> str:
    """Return the identifier of this start of the machine; process ids and monotonic times belong to it."""
    return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()


def anonymous_memory(key: str = "VmRSS") -> int:
    """Return this process's resident bytes less pages of files: now ("VmRSS"), or of the peak so far ("VmHWM")."""
    rows = _status_fields()
    return (_first_number(rows[key]) - _first_number(rows["RssFile"])) * 1024


_is_fork = [False]
"""Whether this process was forked from a fork server, with which it shares pages."""


def note_fork() -> None:
    """Note that this process is a fork: pages that it shares with the fork server are not its own."""
    _is_fork[0] = True


def shared_bytes() -> int:
    """Return the resident bytes, without pages of files, that a fork still shares with its fork server; else 0."""
    if not _is_fork[0]:
        return 0
    shared, mapping = 0, dict[str, int]()
    of_file = False
    for line in Path("/proc/self/smaps").read_text("utf-8", errors="replace").splitlines():
        name, *values = line.split()
        if not name.endswith(":"):  # a new mapping: addresses, permissions, offset, device, inode, path
            shared += _shared_in_mapping(mapping, of_file)
            mapping, of_file = {}, values[3] != "0"
        elif name in ("Anonymous:", "Shared_Dirty:", "Shared_Clean:"):
            mapping[name] = int(values[0])
    return (shared + _shared_in_mapping(mapping, of_file)) * 1024


def _shared_in_mapping(mapping: dict[str, int], of_file: bool) -> int:
    """Return the KiB of a mapping that are shared and not pages of a file: clean shared pages of a file's are."""
    shared = mapping.get("Shared_Dirty:", 0) + (0 if of_file else mapping.get("Shared_Clean:", 0))
    return min(mapping.get("Anonymous:", 0), shared)


_peak_forgotten = [0]
"""Largest peak before the last reset of the kernel's own peak counter."""


def peak_resident_bytes() -> int:
    """Return the peak resident memory of this process in bytes. (getrusage would count the parent's at the fork.)"""
    return max(_peak_forgotten[0], _first_number(_status_fields()["VmHWM"]) * 1024)


def reset_resident_peak() -> None:
    """Reset the kernel's peak counter `VmHWM`, which then holds the peak since this call."""
    _peak_forgotten[0] = peak_resident_bytes()
    Path("/proc/self/clear_refs").write_text("5", "ascii")


def _status_fields() -> dict[str, str]:
    return dict(line.split(":", 1) for line in Path("/proc/self/status").read_text("ascii").splitlines())


def _first_number(text: str) -> int:
    return int(text.split()[0])


def available_memory_bytes() -> int:
    """Return the bytes of memory available on the machine, or left in this process's cgroup if that is less."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text("ascii").splitlines())
    machine = int(fields["MemAvailable"].split()[0]) * 1024
    limit, used = (Path("/sys/fs/cgroup", name) for name in ("memory.max", "memory.current"))
    if limit.exists() and (text := limit.read_text("ascii").strip()).isdecimal():
        return min(machine, int(text) - int(used.read_text("ascii")))
    return machine


def memory_left() -> int:
    """Return the bytes of host memory that this process can still allocate within RLIMIT_AS, cgroup and machine."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return available_memory_bytes()
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])
    return max(0, min(available_memory_bytes(), limit - pages * resource.getpagesize()))


def cores_per_rank(ranks: int) -> int:
    """Return this process's cores divided by the ranks that share them, at least 1."""
    return max(1, len(os.sched_getaffinity(0)) // ranks)
