"""Revision of a folder."""

from __future__ import annotations

import subprocess
from pathlib import Path

from unipar.utils.git import git_revision


def test_the_revision_of_a_folder(tmp_path: Path) -> None:
    """Its commit, a change of a tracked file, and nothing where there is no repository; tags do not matter."""
    work = tmp_path / "work"
    work.mkdir()

    def git(*words: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
        return subprocess.run(("git", "-C", str(work), *who, *words), capture_output=True, text=True, check=True).stdout

    git("init", "-q")
    assert git_revision(work) is None  # no commit yet
    (work / "task.py").write_text("a = 1\n", "utf-8")
    git("add", "task.py")
    git("commit", "-q", "-m", "one")
    git("tag", "-a", "v1", "-m", "v1")
    commit = git("rev-parse", "HEAD").strip()
    assert git_revision(work) == commit
    (work / "new.txt").write_text("not tracked", "utf-8")
    assert git_revision(work) == commit
    (work / "task.py").write_text("a = 2\n", "utf-8")
    assert git_revision(work) == f"{commit}-dirty"
    assert git_revision(tmp_path / "nowhere") is None
