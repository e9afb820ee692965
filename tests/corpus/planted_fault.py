"""`Planted`: an edit of the code that makes one error, and the test that finds it."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Planted:
    """One silent error: an edit of one file, and the test that fails with it."""

    fault: str
    """Training that differs from what was asked, as a sentence."""

    file: str

    old: str
    """Text that the file has once."""

    new: str

    found_by: str
    """Test that passes without the edit and fails with it."""

    @contextmanager
    def planted(self, copy: Path) -> Generator[None]:
        """Context manager: the copy of the code has the error."""
        path = copy / self.file
        text = path.read_text("utf-8")
        if (times := text.count(self.old)) != 1:
            raise ValueError(f"{self.file} has {times} times what is to be replaced: {self.old!r}")
        try:
            _write(path, text.replace(self.old, self.new))
            yield
        finally:
            _write(path, text)


def _write(path: Path, text: str) -> None:
    """Write a file's text, and remove what Python has compiled of it: within a second, both may have one time."""
    path.write_text(text, "utf-8")
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()
