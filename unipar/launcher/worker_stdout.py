"""Rank 0's prints, to log and to the terminal's owner."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any, TextIO

from typing_extensions import Buffer, override

from unipar.run_folder.layout import stdout_path


class WorkerStdout(io.TextIOBase):
    """Stands in for `sys.stdout`; what `logging` writes stays in the log: it is mostly libraries'."""

    def __init__(self, log: TextIO, run: Path) -> None:
        self._log = log
        self._out = stdout_path(run).open("a", encoding="utf-8")

    @override
    def write(self, text: str, /) -> int:
        caller = sys._getframe(1)  # pyright: ignore[reportPrivateUsage] - inspect would take milliseconds to import
        if caller.f_globals.get("__name__") != "logging":
            self._out.write(text)
            if "\n" in text:
                self._out.flush()
        return self._log.write(text)

    @property
    def buffer(self) -> io.BufferedIOBase:
        return _WorkerStdoutBuffer(self._log, self._out)

    def __getattr__(self, name: str) -> Any:
        """Whatever else `sys.stdout` has on the other ranks: reconfigure, line_buffering, name, ..."""
        return getattr(self._log, name)

    @override
    def flush(self) -> None:
        self._out.flush()
        self._log.flush()

    @override
    def close(self) -> None:
        self._out.close()

    @override
    def fileno(self) -> int:
        return self._log.fileno()

    @override
    def isatty(self) -> bool:
        return False

    @override
    def writable(self) -> bool:
        return True

    @property
    @override
    def encoding(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._log.encoding


class _WorkerStdoutBuffer(io.BufferedIOBase):
    """`sys.stdout.buffer`: bytes go the same two ways."""

    def __init__(self, *streams: TextIO) -> None:
        self._streams = streams

    @override
    def write(self, data: Buffer, /) -> int:
        for stream in self._streams:
            stream.flush()  # what was printed before them comes before them
            stream.buffer.write(data)
            stream.buffer.flush()
        return memoryview(data).nbytes

    @override
    def writable(self) -> bool:
        return True
