"""Standard output of rank 0, written to its log and to a file that the parent shows."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any, TextIO

from typing_extensions import Buffer, override

from unipar.run_folder.layout import stdout_path


class WorkerStdout(io.TextIOBase):
    """Replacement of `sys.stdout`; output of `logging` goes to the log only, as most of it is from libraries."""

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
        """Return any other attribute of the log: reconfigure, line_buffering, name, ..."""
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
    """Replacement of `sys.stdout.buffer`: bytes are written to the same two files."""

    def __init__(self, *streams: TextIO) -> None:
        self._streams = streams

    @override
    def write(self, data: Buffer, /) -> int:
        for stream in self._streams:
            stream.flush()  # text that was printed before must come first
            stream.buffer.write(data)
            stream.buffer.flush()
        return memoryview(data).nbytes

    @override
    def writable(self) -> bool:
        return True
