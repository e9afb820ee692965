"""What this machine offers."""

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
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from unipar.utils.files import path_of_tools
from unipar.utils.procfs import memory_available

MIB = 2**20


SOCKET_PATH = 108
"""Bytes in the longest path of a socket."""


ROOM_FOR_SOCKETS = 48
"""Bytes that a rank's own folder and a library's file in it may add to the temporary folder's path."""


STALE = 600.0
"""Seconds after which nobody is still compiling behind a lock."""


_SHM = Path("/dev/shm")


@dataclass(frozen=True)
class Check:
    """One thing looked at."""

    name: str
    status: Literal["ok", "warn", "fail"]
    found: str
    remedy: str = ""


def checks() -> Iterator[Check]:
    """All that needs neither torch nor a backend."""
    yield Check("python", "ok", f"{sys.version.split()[0]} at {sys.executable}")
    yield from _tools()
    yield loopback()
    yield hostname()
    yield shared_memory(_SHM)
    yield leftovers(_SHM)
    yield from limits()
    yield temporary(Path(tempfile.gettempdir()))
    yield _cores()
    yield locks(Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache"))


def _tools() -> Iterator[Check]:
    """Compilers are for `unipar install` and for what libraries compile when it is first used."""
    for name, program, remedy in (
        ("c++ compiler", os.environ.get("CXX", "g++"), "apt install g++"),
        ("make", "make", "apt install make"),
        ("cmake", "cmake", "pip install cmake"),
        ("ninja", "ninja", "pip install ninja"),
    ):
        where = shutil.which(program, path=path_of_tools())
        if where is None:
            yield Check(name, "warn", f"no {program}; nothing can be compiled without it", remedy)
        else:
            shown = subprocess.run([where, "--version"], capture_output=True, text=True, check=False).stdout
            yield Check(name, "ok", f"{where} ({next(iter(shown.splitlines()), 'of unknown version').strip()})")
    header = Path(sysconfig.get_path("include"), "Python.h")
    if header.exists():
        yield Check("Python.h", "ok", str(header))
    else:
        yield Check("Python.h", "warn", f"no {header}; no extension can be compiled", "apt install python3-dev")


def loopback() -> Check:
    """Worlds on one machine meet on 127.0.0.1."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            socket.create_connection(listener.getsockname(), timeout=5).close()
    except OSError as e:
        return Check("loopback", "fail", f"127.0.0.1 cannot be reached: {e}", "ip link set lo up")
    return Check("loopback", "ok", "127.0.0.1 can be reached")


def hostname(name: str | None = None) -> Check:
    """Foreign launchers, and gloo where no interface is named, resolve it."""
    name = socket.gethostname() if name is None else name
    try:
        return Check("host name", "ok", f"{name} is {socket.gethostbyname(name)}")
    except OSError as e:
        return Check(
            "host name",
            "warn",
            f"{name} does not resolve ({e}); launchers other than ours may fail",
            f"add the line '127.0.1.1 {name}' to /etc/hosts",
        )


def shared_memory(folder: Path) -> Check:
    """Data workers hand batches over through it."""
    if not folder.is_dir():
        return Check(str(folder), "fail", "it is not there; data workers cannot start", "mount -t tmpfs tmpfs /dev/shm")
    usage = shutil.disk_usage(folder)
    said = f"{usage.free // MIB} of {usage.total // MIB} MiB free"
    if usage.free <= 64 * MIB:
        return Check(
            str(folder), "warn", f"{said}; data workers may die of it", "docker run --shm-size=1g, or --ipc=host"
        )
    return Check(str(folder), "ok", said)


def leftovers(folder: Path) -> Check:
    """Files of this user in shared memory that no process has open or mapped."""
    name = f"left in {folder}"
    mine = {str(file): file.stat() for file in folder.glob("*") if file.is_file() and file.stat().st_uid == os.getuid()}
    idle = sorted(set(mine) - held(folder))
    if not idle:
        return Check(name, "ok", "nothing")
    size = sum(mine[file].st_size for file in idle) / MIB
    said = f"{len(idle)} {'file' if len(idle) == 1 else 'files'} that no process holds, {size:.1f} MiB"
    return Check(name, "warn", said, "rm " + " ".join(idle[:8]) + (" ..." if len(idle) > 8 else ""))


def held(folder: Path) -> set[str]:
    """What is below `folder` and in some process's hands, as far as this user may see."""
    found: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended meanwhile, or is another user's
            found |= {line.split(maxsplit=5)[-1] for line in (process / "maps").read_text("utf-8").splitlines()}
            for file in (process / "fd").iterdir():
                with suppress(OSError):  # closed meanwhile
                    found.add(os.readlink(file))
    return {path for path in found if path.startswith(f"{folder}/")}


def limits() -> Iterator[Check]:
    """Of this shell; a run inherits them."""
    for name, which, least, remedy in (
        ("open files", resource.RLIMIT_NOFILE, 1024, "ulimit -n 4096"),
        ("processes", resource.RLIMIT_NPROC, 1024, "ulimit -u 4096"),
    ):
        soft, _ = resource.getrlimit(which)
        if soft == resource.RLIM_INFINITY or soft >= least:
            yield Check(name, "ok", f"at most {_limit(soft)}")
        else:
            yield Check(name, "warn", f"at most {soft}; ranks with data workers need {least}", remedy)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if Path("/dev/infiniband").exists() and soft != resource.RLIM_INFINITY:
        said = f"at most {soft // 1024} KiB; InfiniBand needs to lock its buffers"
        yield Check("locked memory", "warn", said, "ulimit -l unlimited")
    else:
        yield Check("locked memory", "ok", f"at most {_limit(soft, 1024)}{'' if soft < 0 else ' KiB'}")


def _limit(soft: int, unit: int = 1) -> str:
    return "unlimited" if soft == resource.RLIM_INFINITY else f"{soft // unit}"


def temporary(folder: Path) -> Check:
    """Each rank has a short folder of its own in it, and sockets there."""
    name = "temporary folder"
    if not os.access(folder, os.W_OK | os.X_OK):
        return Check(name, "fail", f"{folder} cannot be written to", "TMPDIR=/tmp")
    longest = SOCKET_PATH - ROOM_FOR_SOCKETS
    if len(bytes(folder)) > longest:
        said = f"{folder} is {len(bytes(folder))} bytes long; sockets below it need {longest} or fewer"
        return Check(name, "fail", said, "TMPDIR=/tmp")
    free = shutil.disk_usage(folder).free
    if free < 1024 * MIB:
        return Check(name, "warn", f"{folder}, {free // MIB} MiB free", "make room there, or set TMPDIR")
    return Check(name, "ok", f"{folder}, {free // (1024 * MIB)} GiB free")


def _cores() -> Check:
    cores = len(os.sched_getaffinity(0))
    available = memory_available()
    said = f"{cores} {'core' if cores == 1 else 'cores'}, {available / 1024 / MIB:.1f} GiB of memory available"
    if available < 2048 * MIB:
        return Check("cores and memory", "warn", said, "close other programs; a rank takes 0.5 GiB before its model")
    return Check("cores and memory", "ok", said)


def locks(cache: Path) -> Check:
    """A compilation that was killed leaves its lock, and the next one waits for it for ever."""
    now = time.time()
    old = [
        file
        for root in (cache, cache / "torch_extensions", cache / "unipar")
        for depth in ("*/lock", "*/*/lock")
        for file in root.glob(depth)
        if now - file.stat().st_mtime > STALE
    ]
    if not old:
        return Check("compiled extensions", "ok", f"no stale lock in {cache}")
    said = f"{len(old)} stale {'lock' if len(old) == 1 else 'locks'}; what waits for it waits for ever"
    return Check("compiled extensions", "warn", said, "rm " + " ".join(sorted({str(file) for file in old})))
