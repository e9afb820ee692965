"""Checks of this machine that need neither torch nor a backend, for `unipar doctor`."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Literal

from unipar.utils.files import path_with_scripts
from unipar.utils.procfs import available_memory_bytes

BYTES_PER_MIB = 2**20

MAX_SOCKET_PATH_BYTES = 108
"""Length limit that Linux sets for the path of a socket, in bytes."""

SOCKET_NAME_BYTES = 48
"""Bytes that the folder of a rank and the name of a socket in it may add to the temporary folder's path."""

STALE_LOCK_SECONDS = 600.0
"""Age in seconds beyond which a lock was left by a compilation that was killed."""

_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class MachineCheck:
    """Result of one check."""

    name: str
    status: Literal["ok", "warn", "fail"]
    finding: str
    """Finding, in words."""

    remedy: str = ""
    """Command or action that helps; empty where the status is ok."""


def rows_of_checks(checks: Sequence[MachineCheck]) -> list[tuple[str, str, str]]:
    """Return a row for each check, below its heads "", what and found, and one for a remedy, once where it repeats."""
    rows: list[tuple[str, str, str]] = []
    for check, following in zip_longest(checks, checks[1:]):
        rows.append((check.status, check.name, check.finding))
        if check.remedy and (following is None or (check.name, check.remedy) != (following.name, following.remedy)):
            rows.append(("", "", f"-> {check.remedy}"))
    return rows


def check_machine() -> Iterator[MachineCheck]:
    """Yield the checks that need neither torch nor a backend."""
    yield MachineCheck("python", "ok", f"{sys.version.split()[0]} at {sys.executable}")
    yield from _check_tools()
    yield check_loopback()
    yield check_hostname()
    yield check_shared_memory(_SHARED_MEMORY)
    yield check_leftover_files(_SHARED_MEMORY)
    yield from check_limits()
    yield check_temporary_folder(Path(tempfile.gettempdir()))
    yield _check_cores()
    yield check_stale_locks(Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache"))


def _check_tools() -> Iterator[MachineCheck]:
    """Yield checks of compilers: `unipar install` needs them, and libraries that compile extensions at first use."""
    for name, program, remedy in (
        ("c++ compiler", os.environ.get("CXX", "g++"), "apt install g++"),
        ("make", "make", "apt install make"),
        ("cmake", "cmake", "pip install cmake"),
        ("ninja", "ninja", "pip install ninja"),
    ):
        path = shutil.which(program, path=path_with_scripts())
        if path is None:
            yield MachineCheck(name, "warn", f"no {program}; extensions cannot be compiled without it", remedy)
        else:
            output = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
            yield MachineCheck(name, "ok", f"{path} ({next(iter(output.splitlines()), 'unknown version').strip()})")
    header = Path(sysconfig.get_path("include"), "Python.h")
    if header.exists():
        yield MachineCheck("Python.h", "ok", str(header))
    else:
        finding = f"no {header}; extensions cannot be compiled without it"
        yield MachineCheck("Python.h", "warn", finding, "apt install python3-dev")


def check_loopback() -> MachineCheck:
    """Return whether 127.0.0.1 can be reached: the ranks of one machine connect to each other there."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            socket.create_connection(listener.getsockname(), timeout=5).close()
    except OSError as e:
        return MachineCheck("loopback", "fail", f"127.0.0.1 cannot be reached: {e}", "ip link set lo up")
    return MachineCheck("loopback", "ok", "127.0.0.1 can be reached")


def check_hostname(name: str | None = None) -> MachineCheck:
    """Return whether the host name resolves: other launchers need that, and gloo where no interface is named."""
    name = socket.gethostname() if name is None else name
    try:
        return MachineCheck("host name", "ok", f"{name} is {socket.gethostbyname(name)}")
    except OSError as e:
        return MachineCheck(
            "host name",
            "warn",
            f"{name} does not resolve ({e}); launchers other than unipar's may fail",
            f"add the line '127.0.1.1 {name}' to /etc/hosts",
        )


def check_shared_memory(folder: Path) -> MachineCheck:
    """Return whether there is room in shared memory, through which data workers pass batches."""
    if not folder.is_dir():
        return MachineCheck(
            str(folder), "fail", "does not exist; data workers cannot start", "mount -t tmpfs tmpfs /dev/shm"
        )
    usage = shutil.disk_usage(folder)
    finding = f"{usage.free // BYTES_PER_MIB} of {usage.total // BYTES_PER_MIB} MiB free"
    if usage.free <= 64 * BYTES_PER_MIB:
        return MachineCheck(
            str(folder), "warn", f"{finding}; data workers may crash", "docker run --shm-size=1g, or --ipc=host"
        )
    return MachineCheck(str(folder), "ok", finding)


def check_leftover_files(folder: Path) -> MachineCheck:
    """Return a warning where files of this user lie in shared memory that no process has open or mapped."""
    name = f"left in {folder}"
    mine = {str(file): file.stat() for file in folder.glob("*") if file.is_file() and file.stat().st_uid == os.getuid()}
    idle = sorted(set(mine) - find_open_files(folder))
    if not idle:
        return MachineCheck(name, "ok", "nothing")
    size = sum(mine[file].st_size for file in idle) / BYTES_PER_MIB
    finding = f"{len(idle)} {'file' if len(idle) == 1 else 'files'} that no process uses, {size:.1f} MiB"
    return MachineCheck(name, "warn", finding, "rm " + " ".join(idle[:8]) + (" ..." if len(idle) > 8 else ""))


def find_open_files(folder: Path) -> set[str]:
    """Return the files below `folder` that a process has open or mapped, as far as this user may see."""
    paths: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process ended meanwhile, or is another user's
            paths |= {line.split(maxsplit=5)[-1] for line in (process / "maps").read_text("utf-8").splitlines()}
            for file in (process / "fd").iterdir():
                with suppress(OSError):  # closed meanwhile
                    paths.add(os.readlink(file))
    return {path for path in paths if path.startswith(f"{folder}/")}


def check_limits() -> Iterator[MachineCheck]:
    """Yield the resource limits of this shell, which a run inherits."""
    for name, which, least, remedy in (
        ("open files", resource.RLIMIT_NOFILE, 1024, "ulimit -n 4096"),
        ("processes", resource.RLIMIT_NPROC, 1024, "ulimit -u 4096"),
    ):
        soft, _ = resource.getrlimit(which)
        if soft == resource.RLIM_INFINITY or soft >= least:
            yield MachineCheck(name, "ok", f"at most {_format_limit(soft)}")
        else:
            yield MachineCheck(name, "warn", f"at most {soft}; ranks with data workers need {least}", remedy)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if Path("/dev/infiniband").exists() and soft != resource.RLIM_INFINITY:
        finding = f"at most {soft // 1024} KiB; InfiniBand needs to lock its buffers"
        yield MachineCheck("locked memory", "warn", finding, "ulimit -l unlimited")
    else:
        yield MachineCheck("locked memory", "ok", f"at most {_format_limit(soft, 1024)}{'' if soft < 0 else ' KiB'}")


def _format_limit(soft: int, unit: int = 1) -> str:
    return "unlimited" if soft == resource.RLIM_INFINITY else f"{soft // unit}"


def check_temporary_folder(folder: Path) -> MachineCheck:
    """Return whether the temporary folder can be used: each rank has a folder with sockets in it."""
    name = "temporary folder"
    if not os.access(folder, os.W_OK | os.X_OK):
        return MachineCheck(name, "fail", f"{folder} cannot be written to", "TMPDIR=/tmp")
    longest = MAX_SOCKET_PATH_BYTES - SOCKET_NAME_BYTES
    if len(bytes(folder)) > longest:
        finding = f"{folder} is {len(bytes(folder))} bytes long; sockets in it need {longest} or fewer"
        return MachineCheck(name, "fail", finding, "TMPDIR=/tmp")
    free = shutil.disk_usage(folder).free
    if free < 1024 * BYTES_PER_MIB:
        return MachineCheck(
            name, "warn", f"{folder}, {free // BYTES_PER_MIB} MiB free", "free some space there, or set TMPDIR"
        )
    return MachineCheck(name, "ok", f"{folder}, {free // (1024 * BYTES_PER_MIB)} GiB free")


def _check_cores() -> MachineCheck:
    cores = len(os.sched_getaffinity(0))
    available = available_memory_bytes()
    finding = (
        f"{cores} {'core' if cores == 1 else 'cores'}, {available / 1024 / BYTES_PER_MIB:.1f} GiB of memory available"
    )
    if available < 2048 * BYTES_PER_MIB:
        return MachineCheck(
            "cores and memory", "warn", finding, "close other programs; a rank needs 0.5 GiB besides its model"
        )
    return MachineCheck("cores and memory", "ok", finding)


def check_stale_locks(cache: Path) -> MachineCheck:
    """Return a warning where a killed compilation left its lock: the next compilation would wait for ever."""
    now = time.time()
    old = [
        file
        for root in (cache, cache / "torch_extensions", cache / "unipar")
        for depth in ("*/lock", "*/*/lock")
        for file in root.glob(depth)
        if now - file.stat().st_mtime > STALE_LOCK_SECONDS
    ]
    if not old:
        return MachineCheck("compiled extensions", "ok", f"no stale lock in {cache}")
    finding = f"{len(old)} stale {'lock' if len(old) == 1 else 'locks'}; the next compilation would wait for ever"
    return MachineCheck("compiled extensions", "warn", finding, "rm " + " ".join(sorted({str(file) for file in old})))
