"""`unipar report`: the page of a comparison, made again from what lies in its folder; of two, one over the other."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from unipar.errors import ReportError
from unipar.report.page import page
from unipar.report.seen import Told

NAME = "report.html"


def report(run: Path, after: Path | None = None, out: Path | None = None) -> Path:
    """The page of `run`, beside its compare.json or at `out`; of two, that of `after` with `run` laid below."""
    first = Told.read(run)
    told = first if after is None else Told.read(after)
    return written(page(told, None if after is None else first), out or told.folder / NAME)


def beside(folder: Path) -> str:
    """The page of a comparison that has just ended, as a sentence for its table: it never fails."""
    try:
        return f"page: {report(folder)}"
    except Exception as e:  # what was measured is written already, and must be shown
        return f"no page: {e}" if isinstance(e, ReportError) else f"no page: {type(e).__name__}: {e}"


def written(text: str, to: Path) -> Path:
    """All of it or none."""
    partial = to.with_name(f".{to.name}.{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(to)
    except OSError as e:
        with suppress(OSError):
            partial.unlink()
        raise ReportError(f"{to} cannot be written: {e.strerror}; --out FILE takes another place") from None
    return to
