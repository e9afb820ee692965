"""First process of a machine: it lays out the machine's files, and ends all that runs there by ending.

    python -m tests.support.machines.first_process LAYOUT       LAYOUT: a `Layout` as JSON

It prints its process number when the machine is ready, and ends when its standard input does: with the process that
started it, also after kill -9.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.support.private import CLONE_NEWNET, CLONE_NEWNS, CLONE_NEWPID, unshare

CLONE_NEWUTS, CLONE_NEWIPC = 0x04000000, 0x08000000
MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 32, 1 << 12, 1 << 14, 1 << 18
PR_SET_PDEATHSIG = 1

DISK = ("/tmp", "/root", "/var/tmp")
"""Folders that each machine has for itself, on its disk."""

MEMORY = ("/dev/shm", "/run")
"""The same, in its memory."""

_OF_THE_KERNEL = {"proc", "sysfs", "devtmpfs", "devpts", "cgroup", "cgroup2", "mqueue", "bpf", "tracefs", "debugfs"}


@dataclass(frozen=True)
class Layout:
    """Files of a machine."""

    name: str
    folder: str
    """Where its disk lies."""

    hosts: str
    """Text of its /etc/hosts."""

    read: list[str]
    """Folders below DISK or MEMORY that it sees all the same, read-only as everything else."""

    share: list[str]
    """Folders that it sees and may write to: a file system in the network."""

    def dumps(self) -> str:
        return json.dumps(asdict(self))


def disk_name(hidden: str) -> str:
    """Return the name, in the folder of a machine's disk, of what it sees as `hidden`."""
    return hidden.strip("/").replace("/", "-")


def _mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    encoded = (text.encode() if text is not None else None for text in (source, target, kind))
    if libc.mount(*encoded, ctypes.c_ulong(flags), options.encode() if options else None) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), target)


def _lay_out(layout: Layout) -> None:
    _mount("none", "/", None, MS_REC | MS_PRIVATE)
    mounted = [line.split() for line in Path("/proc/self/mountinfo").read_text("utf-8").splitlines()]
    for path in (layout.folder, *layout.share):
        _mount(path, path, None, MS_BIND)
    for words in mounted:
        if words[words.index("-") + 1] not in _OF_THE_KERNEL:
            with suppress(OSError):  # one that a later mount hides
                _mount("none", words[4], None, MS_REMOUNT | MS_BIND | MS_RDONLY)
    os.chdir(layout.folder)  # names are relative to it from here on, for /tmp may hide it
    _mount("proc", "/proc", "proc", 0)
    hidden = [path for path in (*DISK, *MEMORY) if os.path.isdir(path)]
    for path in hidden:
        _fill(layout, path)
    for path in hidden:  # all are filled first: what is bound into one may lie below another
        _mount(disk_name(path), path, None, MS_BIND | MS_REC)
    files = {
        "/etc/hosts": layout.hosts,
        "/etc/resolv.conf": "options attempts:1 timeout:1\n",  # nobody is asked, and says so at once
        "/proc/sys/kernel/random/boot_id": f"{uuid.uuid4()}\n",
        "/etc/machine-id": f"{uuid.uuid4().hex}\n",
    }
    for path, text in files.items():
        if os.path.exists(path):
            own = Path(Path(path).name)
            own.write_text(text, "utf-8")
            _mount(str(own), path, None, MS_BIND)
    os.chdir("/")


def _fill(layout: Layout, path: str) -> None:
    """What is seen as `path`: empty but for folders that are bound into it."""
    folder = Path(disk_name(path))
    folder.mkdir(exist_ok=True)
    folder.chmod(0o700 if path == "/root" else 0o1777)
    if path in MEMORY:
        _mount("tmpfs", str(folder), "tmpfs", 0, "mode=1777")
    for seen, flags in [*((path, MS_RDONLY) for path in layout.read), *((path, 0) for path in layout.share)]:
        if Path(seen).is_relative_to(path):
            place = folder / Path(seen).relative_to(path)
            place.mkdir(parents=True, exist_ok=True)
            _mount(seen, str(place), None, MS_BIND)
            _mount("none", str(place), None, MS_REMOUNT | MS_BIND | flags)


def main() -> None:
    """Make a machine, or with an empty layout a namespace that holds a switch."""
    layout = Layout(**json.loads(sys.argv[1])) if sys.argv[1:] else None
    more = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC if layout else 0
    unshare(CLONE_NEWNET | CLONE_NEWPID | more)
    reader, writer = os.pipe()
    parent = os.fork()
    if parent != 0:
        os.close(writer)
        if os.read(reader, 1):
            sys.stdout.write(f"{parent}\n")
            sys.stdout.flush()
        os.waitpid(parent, 0)
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if layout:
        socket.sethostname(layout.name)
        _lay_out(layout)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries orphans
    os.write(writer, b"!")
    sys.stdin.read()
    os._exit(0)  # and the kernel ends every process of this table


if __name__ == "__main__":
    main()
