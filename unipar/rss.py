"""What the system counts for this process."""

from __future__ import annotations

from pathlib import Path


def anonymous(key: str = "VmRSS") -> int:
    """Bytes of this process that are no pages of files; `VmHWM` is the most so far."""
    rows = _status()
    return (_kib(rows[key]) - _kib(rows["RssFile"])) * 1024


def peak_rss() -> int:
    """The most memory this process ever held, in bytes. (getrusage counts what the parent held at the fork.)"""
    return _kib(_status()["VmHWM"]) * 1024


def _status() -> dict[str, str]:
    return dict(line.split(":", 1) for line in Path("/proc/self/status").read_text("ascii").splitlines())


def _kib(said: str) -> int:
    return int(said.split()[0])
