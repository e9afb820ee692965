"""Entry points are found as `importlib.metadata` finds them, and are read once."""

from __future__ import annotations

import os
import shutil
import sys
from importlib.metadata import distributions, entry_points
from pathlib import Path
from typing import Any

import pytest

from unipar.errors import UniparError
from unipar.utils import entry_points as ours
from unipar.utils.entry_points import PluginGroup


class NotFound(UniparError):
    """No plugin has that name."""


GROUP: PluginGroup[str] = PluginGroup("colours", "colour", "colour {!r}", "a word", str, NotFound)


def install(folder: Path, package: str, *lines: str) -> Path:
    """Write a package with these entry points into a folder, as pip would; return the folder of its metadata."""
    made = folder / f"{package}-1.0.dist-info"
    made.mkdir(parents=True)
    (made / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n", encoding="utf-8")
    (made / "entry_points.txt").write_text("\n".join(("[colours]", *lines)) + "\n", encoding="utf-8")
    return made


def changed_later(folder: Path) -> None:
    """Set when a folder was changed a second on: the test is faster than some clocks."""
    now = folder.stat().st_mtime_ns
    os.utime(folder, ns=(now, now + 1_000_000_000))


@pytest.mark.parametrize(
    "group", ["unipar.backends", "unipar.trackers", "unipar.machines", "pytest11", "console_scripts"]
)
def test_those_of_importlib(group: str) -> None:
    """Names are those that the standard library finds."""
    names = PluginGroup[object](group, "", "", "", object, NotFound).names()
    assert names == sorted({point.name for point in entry_points(group=group)})
    assert names


def test_what_is_installed_later_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that comes into a folder is found at once, and one that goes is gone."""
    monkeypatch.syspath_prepend(tmp_path)
    assert GROUP.names() == []
    first = install(tmp_path, "paints", "red = string:digits")
    changed_later(tmp_path)
    assert GROUP.names() == ["red"]
    assert GROUP.find("red") == "0123456789"
    install(tmp_path, "more_paints", "blue = string:octdigits", "green = string:hexdigits")
    changed_later(tmp_path)
    assert GROUP.names() == ["blue", "green", "red"]
    shutil.rmtree(first)
    changed_later(tmp_path)
    assert GROUP.names() == ["blue", "green"]


def test_the_first_of_two_of_one_name_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that is in two folders of `sys.path` is the first one's, however its name is written."""
    install(tmp_path / "a", "oil_paints", "red = string:digits")
    install(tmp_path / "b", "Oil.Paints", "red = string:octdigits", "blue = string:octdigits")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "a"), str(tmp_path / "b"), *sys.path])
    assert GROUP.names() == ["red"]
    assert GROUP.find("red") == "0123456789"
    sys.path[:2] = reversed(sys.path[:2])
    assert GROUP.names() == ["blue", "red"]
    assert GROUP.find("red") == "01234567"


def test_files_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second lookup reads no package, in whatever group; a folder that is new on the path is read alone."""
    read: list[str] = []

    def listed(path: list[str]) -> Any:
        read.extend(path)
        return distributions(path=path)

    monkeypatch.setattr(ours, "distributions", listed)
    GROUP.names()
    read.clear()
    PluginGroup[object]("unipar.backends", "", "", "", object, NotFound).names()
    assert read == []
    install(tmp_path, "paints", "red = string:digits")
    monkeypatch.syspath_prepend(tmp_path)
    assert GROUP.names() == ["red"]
    assert read == [str(tmp_path)]
