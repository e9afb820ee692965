"""Revision of the code in a folder, from git."""

from __future__ import annotations

import subprocess
from pathlib import Path


def git_revision(folder: Path) -> str | None:
    """Return the commit that a folder is at, with "-dirty" if tracked files differ from it; None if git cannot say."""
    command = ("git", "-C", str(folder), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty")
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip() or None
