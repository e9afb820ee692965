"""Runs a command in a network of its own: what launchers open to every interface is open to nobody.

    python tests/support/private.py COMMAND...

Where the kernel gives no such network, the command runs without.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import sys
from contextlib import suppress
from pathlib import Path

CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x00020000, 0x10000000, 0x20000000, 0x40000000
SIOCSIFADDR, SIOCSIFNETMASK, SIOCSIFFLAGS, IFF_UP = 0x8916, 0x891C, 0x8914, 1


def unshare(flags: int) -> None:
    """As unshare(2)."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(flags) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def enter_private_network() -> None:
    """This process in a network with a loopback of its own; raises where it may not."""
    user, group = os.getuid(), os.getgid()
    if user == 0:
        unshare(CLONE_NEWNET)
    else:
        unshare(CLONE_NEWUSER | CLONE_NEWNET)
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            Path("/proc/self", name).write_text(text, encoding="ascii")
    _set_flags("lo", IFF_UP)


def add_loopback_address(text: str) -> None:
    """One more address on this network's loopback."""
    with socket.socket() as asked:
        for request, value in ((SIOCSIFADDR, text), (SIOCSIFNETMASK, "255.255.255.255")):
            name = struct.pack("16sH2x4s8x", b"lo:1", socket.AF_INET, socket.inet_aton(value))
            fcntl.ioctl(asked, request, name)


def take_down_loopback() -> None:
    """No loopback any more in this network, which must be one of this process's own."""
    _set_flags("lo", 0)


def _set_flags(name: str, flags: int) -> None:
    with socket.socket() as asked:
        fcntl.ioctl(asked, SIOCSIFFLAGS, struct.pack("16sH14x", name.encode(), flags))


if __name__ == "__main__":
    with suppress(OSError):
        enter_private_network()
    os.execvp(sys.argv[1], sys.argv[1:])
