"""What the system counts for this process."""

from __future__ import annotations

from pathlib import Path


def anonymous(key: str = "VmRSS") -> int:
    """Bytes of this process that are no pages of files; `VmHWM` is the most so far."""
    rows = _status()
    return (_kib(rows[key]) - _kib(rows["RssFile"])) * 1024


_forgotten = [0]
"""The most before the system was told to forget it."""


def peak_rss() -> int:
    """The most memory this process ever held, in bytes. (getrusage counts what the parent held at the fork.)"""
    return max(_forgotten[0], _kib(_status()["VmHWM"]) * 1024)


def forget_peak() -> None:
    """From here on `VmHWM` is the most since now."""
    _forgotten[0] = peak_rss()
    Path("/proc/self/clear_refs").write_text("5", "ascii")


def _status() -> dict[str, str]:
    return dict(line.split(":", 1) for line in Path("/proc/self/status").read_text("ascii").splitlines())


def _kib(said: str) -> int:
    return int(said.split()[0])
