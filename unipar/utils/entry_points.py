"""Lookup of plugins by name in an entry-point group; unipar's own plugins are found in the same way."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import EntryPoint, distributions
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Generic, TypeVar

from unipar.errors import BackendNotInstalled, UniparError
from unipar.utils.text import closest

P = TypeVar("P")


@dataclass(frozen=True)
class PluginGroup(Generic[P]):
    """Plugins of one kind: an entry-point group, and the words that errors use for it."""

    group: str
    noun: str
    """Word for one plugin in error messages, such as "backend"."""

    label: str
    """Beginning of the error about a missing library, a format string for the plugin's name: "backend {!r}"."""

    wanted: str
    """Words for the object that an entry point of the group must name: "an instance of Backend"."""

    kind: type[Any]
    """Class of the plugins, or their base class."""

    not_found: type[UniparError]
    advise: Callable[[str], str] = lambda _: ""
    """Return what to write in place of a name that other libraries have, or "" if it is not known."""

    are_classes: bool = False
    """Whether an entry point names a subclass of `kind` instead of an instance."""

    def names(self) -> list[str]:
        """Return the names of all plugins that are installed, sorted."""
        return sorted({point.name for point in _entry_points(self.group)})

    def find(self, name: str) -> P:
        """Return the plugin of that name; the libraries that the plugin needs may be missing."""
        by_package = {point.value: point for point in _entry_points(self.group) if point.name == name}
        if not by_package:
            known = self.names()
            advice = self.advise(name)
            near = None if advice else closest(name, known)
            hint = f"{advice}; " if advice else f"did you mean {near!r}? " if near else ""
            raise self.not_found(f"no {self.noun} {name!r}; {hint}known: {', '.join(known)}")
        if len(by_package) > 1:
            packages = ", ".join(sorted(by_package))
            raise self.not_found(
                f"{len(by_package)} packages offer a {self.noun} {name!r} ({packages}); uninstall all but one"
            )
        ((value, point),) = by_package.items()
        plugin: Any = point.load()
        if not self._fits(plugin):
            raise TypeError(f"{value} is {plugin!r}; a {self.group} entry point names {self.wanted}")
        return plugin

    def _fits(self, plugin: object) -> bool:
        if self.are_classes:
            return isinstance(plugin, type) and issubclass(plugin, self.kind)
        return isinstance(plugin, self.kind)

    def missing(self, name: str, requires: Sequence[str], hint: str) -> str | None:
        """Return why a plugin that requires these modules cannot be used here, or None. Nothing is imported.

        `hint` is the command that installs the modules; empty: the extra of unipar with the plugin's name.
        """
        absent = [module for module in requires if find_spec(module) is None]
        if not absent:
            return None
        hint = hint or f"pip install 'unipar[{name}]'"
        return f"{self.label.format(name)} needs {', '.join(absent)}, not installed here: {hint}"

    def require(self, name: str, requires: Sequence[str], hint: str) -> None:
        """Raise BackendNotInstalled unless every module that the plugin needs is installed. Nothing is imported."""
        if why := self.missing(name, requires, hint):
            raise BackendNotInstalled(why)


def _entry_points(group: str) -> list[EntryPoint]:
    """Return the entry points of a group, as `importlib.metadata.entry_points` does, which reads all files each time.

    Of a package that is in several folders of `sys.path` the first counts.
    """
    points: dict[str, tuple[EntryPoint, ...]] = {}
    for folder in sys.path:
        for package, its_points in _points_of_packages(folder, _changed(folder)):
            points.setdefault(package, its_points)
    return [point for its_points in points.values() for point in its_points if point.group == group]


def _changed(folder: str) -> int | None:
    """Return when packages were last put into a folder, or taken out; None if there is no such folder."""
    try:
        return Path(folder).stat().st_mtime_ns
    except OSError:
        return None


@lru_cache(maxsize=64)
def _points_of_packages(folder: str, changed: int | None) -> list[tuple[str, tuple[EntryPoint, ...]]]:
    """Return the packages in a folder, each by its normalized name, with its entry points."""
    points: list[tuple[str, tuple[EntryPoint, ...]]] = []
    for package in distributions(path=[folder]):
        quick = getattr(package, "_normalized_name", None)  # from the folder's name: METADATA is not read
        name = quick or re.sub("[-_.]+", "_", package.name).lower()
        points.append((name, tuple(package.entry_points)))
    return points
