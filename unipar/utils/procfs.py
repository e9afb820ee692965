"""Facts from /proc and cgroups: state and start of a process, memory of this process and of the machine, OOM kills."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

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
    """Return bytes of this process's resident memory without pages of files: now ("VmRSS"), or at its peak ("VmHWM").

    Pages of files count as of now in both: Linux keeps no peak of them.
    """
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


# Lack of memory


_ROOT: Final = Path("/")

_CONTROLLERS: Final = ("sys/fs/cgroup/memory", "sys/fs/cgroup", "sys/fs/cgroup/unified")
"""Folders at which the memory controller is mounted: version 1, version 2, and version 2 beside version 1."""

_COUNTERS: Final = ("memory.events", "memory.oom_control")
"""Files of a cgroup that have a line `oom_kill N`: version 2, version 1."""

_LIMITS: Final = ("memory.max", "memory.limit_in_bytes")


@dataclass(frozen=True)
class OomKillCount:
    """Number of processes that the kernel has killed for lack of memory, up to one moment."""

    number: int
    where: str
    """Scope of the counts: this cgroup, or this machine."""


def count_oom_kills(root: Path = _ROOT) -> OomKillCount | None:
    """Return the number of kills in this process's cgroup, else on the machine; None if the kernel shows neither.

    A cgroup's own counter decides: that of the machine also has the kills of all other containers.
    """
    cgroup = next(memory_cgroups(root), None)
    if cgroup is not None:
        for name in _COUNTERS:
            if (number := _counter(cgroup / name)) is not None:
                return OomKillCount(number, "in this cgroup")
    number = _counter(root / "proc/vmstat")
    return None if number is None else OomKillCount(number, "on this machine")


def memory_limit_bytes(root: Path = _ROOT) -> int:
    """Return the bytes of memory that the machine has, or the lowest limit of this process's cgroups if it is less."""
    fields = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text("ascii").splitlines())
    limits = [int(fields["MemTotal"].split()[0]) * 1024]
    for cgroup in memory_cgroups(root):
        limits += [int(text) for name in _LIMITS if (text := _read(cgroup / name).strip()).isdecimal()]
    return min(limits)


def memory_cgroups(root: Path = _ROOT) -> Iterator[Path]:
    """Yield the folder of this process's memory cgroup, then those of its ancestors up to the mounted one."""
    lines = [line.split(":", 2) for line in _read(root / "proc/self/cgroup").splitlines()]
    paths = {path for number, controllers, path in lines if number == "0" or "memory" in controllers.split(",")}
    for mount in (root / folder for folder in _CONTROLLERS):
        # in a container the path may be the host's, and the mounted folder the container's own cgroup
        inside = [path for path in sorted(paths) if ".." not in path and _has_memory(mount / path.lstrip("/"))]
        if inside:
            own = PurePosixPath(max(inside, key=len).lstrip("/"))
            yield from (mount / folder for folder in (own, *own.parents) if _has_memory(mount / folder))
            return
        if _has_memory(mount):
            yield mount
            return


def _has_memory(cgroup: Path) -> bool:
    return any((cgroup / name).exists() for name in (*_COUNTERS, *_LIMITS))


def _counter(path: Path) -> int | None:
    """Return the number in the line `oom_kill N` of a file, or None if there is none."""
    words = (line.split() for line in _read(path).splitlines())
    return next((int(line[1]) for line in words if len(line) == 2 and line[0] == "oom_kill"), None)


def _read(path: Path) -> str:
    try:
        return path.read_text("ascii", errors="replace")
    except OSError:
        return ""
