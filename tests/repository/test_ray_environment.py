"""The environment that `make ray` makes, as far as it can be seen without a download."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.ray_environment import NoRay, is_here, make_environment
from tests.support.world import ROOT


def test_it_is_made_once(tmp_path: Path) -> None:
    """One that is ready, on top of the environment that runs, is taken as it is."""
    (tmp_path / "ready").write_text(sys.prefix, "utf-8")
    assert make_environment(tmp_path) == tmp_path / "bin/python"
    assert not is_here()


def test_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One on top of another environment is made again, which takes room; without, it stays as it was."""
    (tmp_path / "ready").write_text("/elsewhere", "utf-8")

    def full(place: Path) -> SimpleNamespace:
        return SimpleNamespace(free=1e8)

    monkeypatch.setattr(shutil, "disk_usage", full)
    with pytest.raises(NoRay) as e:
        make_environment(tmp_path)
    assert str(e.value) == f"Ray takes 0.6 GB, and {ROOT} has 0.1 GB free: make room"
    assert [path.name for path in tmp_path.iterdir()] == ["ready"]
