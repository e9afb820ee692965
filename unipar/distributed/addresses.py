"""Addresses of machines: resolution of host names, and the interface through which another machine is reached."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import ipaddress
import re
import socket
import struct
import time
from pathlib import Path
from typing import Final

from unipar.errors import WorldMismatch

LOOPBACK: Final = "127.0.0.1"

_LIST_ADDRESSES = 0x8912
"""Request SIOCGIFCONF: name and IPv4 address of each interface, aliases too."""

_ENTRY_BYTES = 40
"""Size of an entry in its answer: 16 bytes of name, then the address."""

RESOLVE_SECONDS = 20.0
"""Seconds in which a host name must resolve: names of pods appear some time after the pods."""


def resolve_host(host: str, patience: float = RESOLVE_SECONDS, *, said_by: str = "") -> str:
    """Return the numeric address of a host, one that is not on loopback if it has several.

    `said_by` begins the sentence of the WorldMismatch that is raised if the name does not resolve in that time.
    """
    until = time.monotonic() + patience
    while True:
        try:
            addresses = [str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
        except OSError as e:
            if time.monotonic() > until:
                raise WorldMismatch(
                    f"{said_by or 'the address of rank 0'}: the name {host!r} does not resolve on "
                    f"{socket.gethostname()} ({e.strerror}): give rank 0's numeric address instead of its name, or add "
                    "the name to /etc/hosts of every machine"
                ) from None
            time.sleep(0.5)
            continue
        return next((address for address in addresses if not is_loopback(address)), addresses[0])


def is_loopback(address: str) -> bool:
    """Return whether a numeric address is one of this machine's loopback addresses."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def is_ipv6(address: str) -> bool:
    """Return whether a numeric address is one of IPv6."""
    return ":" in address


def with_port(host: str, port: int) -> str:
    """Return host and port as one text, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if is_ipv6(host) else f"{host}:{port}"


def own_address_toward(peer: str) -> str:
    """Return the address of this machine from which packets to a numeric address go out; nothing is sent."""
    family = socket.AF_INET6 if is_ipv6(peer) else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as asked:
        try:
            asked.connect((peer, 9))
        except OSError as e:
            raise WorldMismatch(
                f"{socket.gethostname()} has no route to {peer} ({e.strerror}): are both machines in one network?"
            ) from None
        return str(asked.getsockname()[0])


def interface_of(address: str) -> str | None:
    """Return the name of this machine's interface that has a numeric address, or None if none has."""
    wanted = ipaddress.ip_address(address.partition("%")[0])
    rows = _ipv6_interfaces() if wanted.version == 6 else _ipv4_interfaces()
    return next((name for name, has in rows if ipaddress.ip_address(has) == wanted), None)


def address_of_interface(name: str, *, ipv6: bool = False) -> str | None:
    """Return the first address of this machine's interface of that name, or None if it has none."""
    return next((has for own, has in (_ipv6_interfaces() if ipv6 else _ipv4_interfaces()) if own == name), None)


def _ipv4_interfaces() -> list[tuple[str, str]]:
    """Return name and address of each interface; the name of an alias is its label."""
    room = bytearray(_ENTRY_BYTES * 256)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        where = ctypes.addressof(ctypes.c_char.from_buffer(room))
        answer = fcntl.ioctl(asked, _LIST_ADDRESSES, struct.pack("iP", len(room), where))
    filled = struct.unpack("iP", answer)[0]
    rows = [bytes(room[i : i + _ENTRY_BYTES]) for i in range(0, filled, _ENTRY_BYTES)]
    return [(row[:16].partition(b"\0")[0].decode(), socket.inet_ntoa(row[20:24])) for row in rows]


def _ipv6_interfaces() -> list[tuple[str, str]]:
    table = Path("/proc/net/if_inet6")
    if not table.exists():
        return []
    rows = [line.split() for line in table.read_text("ascii").splitlines()]
    return [(row[5], str(ipaddress.ip_address(bytes.fromhex(row[0])))) for row in rows]


def first_host(nodes: str) -> str:
    """Return the first host in Slurm's notation of several: `gpu[03-04,7],login` begins with gpu03."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0] if first else nodes)


def port_of_job(job: str) -> int:
    """Return a port that is the same on all machines of a job, and most likely another one for another job.

    It lies below the ports that the kernel gives to connections.
    """
    return 20_000 + int.from_bytes(hashlib.sha256(job.encode()).digest()[:4], "big") % 12_000
