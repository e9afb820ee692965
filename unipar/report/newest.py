"""Newest results in a folder of runs, for `unipar report` without a folder."""

from __future__ import annotations

from pathlib import Path

from unipar.errors import ReportError
from unipar.results.result_files import RESULT_FILES
from unipar.results.run_list import list_runs


def find_newest_results(runs: Path) -> Path:
    """Return the folder in `runs` whose results were written last, of those that have a page."""
    entries = list_runs(runs) if runs.is_dir() else []
    pages = [entry for entry in entries if _has_page(Path(entry.folder))]
    if not pages:
        what = f"{runs} holds no results yet" if runs.is_dir() else f"there is no folder {runs} here"
        raise ReportError(f"{what}: train first (unipar run FILE), or name a run folder (unipar report RUN)")
    newest = max(pages, key=lambda entry: entry.changed)
    return Path(newest.folder) if newest.kind in ("run", "observation") else Path(newest.folder).parent


def _has_page(folder: Path) -> bool:
    return any((folder / name).is_file() for name in RESULT_FILES if "/" not in name)
