"""Network interfaces of this machine: largest packet and speed of the link."""

from __future__ import annotations

import ctypes
import fcntl
import socket
import struct
from typing import Final

_GET_MTU: Final = 0x8921
"""Request SIOCGIFMTU."""

_ETHTOOL: Final = 0x8946
"""Request SIOCETHTOOL; /sys/class/net may show the interfaces of another network namespace."""

_GET_SETTINGS: Final = 1
_SPEED_LOW: Final = 12
_SPEED_HIGH: Final = 28
"""Offsets of the speed's two halves in the answer, `struct ethtool_cmd`."""

_UNKNOWN_SPEEDS: Final = (0, 0xFFFF, 0xFFFFFFFF)


def mtu_of_interface(name: str) -> int | None:
    """Return the largest packet that an interface sends, in bytes, or None if there is no such interface."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
            answer = fcntl.ioctl(asked, _GET_MTU, struct.pack("16si", name.encode()[:15], 0).ljust(40, b"\0"))
    except OSError:
        return None
    return int(struct.unpack_from("i", answer, 16)[0])


def speed_of_interface(name: str) -> int | None:
    """Return the speed of an interface's link in Mbit/s, or None if its driver does not tell it."""
    settings = ctypes.create_string_buffer(struct.pack("I", _GET_SETTINGS), 44)
    request = struct.pack("16sP", name.encode()[:15], ctypes.addressof(settings)).ljust(40, b"\0")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
            fcntl.ioctl(asked, _ETHTOOL, request)
    except OSError:
        return None
    (low,), (high,) = struct.unpack_from("H", settings, _SPEED_LOW), struct.unpack_from("H", settings, _SPEED_HIGH)
    speed = low | high << 16
    return None if speed in _UNKNOWN_SPEEDS else speed
