"""Plugins that are found by name in an entry-point group; those of this package are found in the same way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import Generic, TypeVar

from typing_extensions import TypeIs

from unipar.errors import BackendNotInstalled, UniparError
from unipar.utils.text import closest

P = TypeVar("P")


@dataclass(frozen=True)
class PluginGroup(Generic[P]):
    """Plugins of one kind: an entry-point group, and the words that errors use for it."""

    group: str
    noun: str
    """"backend": what errors call one of them."""

    label: str
    """"backend {!r}": how the error about a missing library begins, with the plugin's name filled in."""

    wanted: str
    """"an instance of Backend": what an entry point of the group must name."""

    is_plugin: Callable[[object], TypeIs[P]]
    not_found: type[UniparError]

    def names(self) -> list[str]:
        """Return the names of all plugins that are installed, sorted."""
        return sorted({point.name for point in entry_points(group=self.group)})

    def find(self, name: str) -> P:
        """Return the plugin of that name; the libraries that it needs may be missing."""
        found = {point.value: point for point in entry_points(group=self.group, name=name)}
        if not found:
            known = self.names()
            near = closest(name, known)
            hint = f"did you mean {near!r}? " if near else ""
            raise self.not_found(f"no {self.noun} {name!r}; {hint}known: {', '.join(known)}")
        if len(found) > 1:
            packages = ", ".join(sorted(found))
            raise self.not_found(
                f"{len(found)} packages offer a {self.noun} {name!r} ({packages}); uninstall all but one"
            )
        ((value, point),) = found.items()
        plugin: object = point.load()
        if not self.is_plugin(plugin):
            raise TypeError(f"{value} is {plugin!r}; a {self.group} entry point names {self.wanted}")
        return plugin

    def missing(self, name: str, requires: Sequence[str], hint: str) -> str | None:
        """Return why a plugin that needs these modules cannot be used here, or None. Imports nothing.

        An empty hint means that this package's extra of the plugin's name brings them.
        """
        absent = [module for module in requires if find_spec(module) is None]
        if not absent:
            return None
        hint = hint or f"pip install 'unipar[{name}]'"
        return f"{self.label.format(name)} needs {', '.join(absent)}, not installed here: {hint}"

    def require(self, name: str, requires: Sequence[str], hint: str) -> None:
        """Raise unless every module that the plugin needs is installed. Imports nothing."""
        if why := self.missing(name, requires, hint):
            raise BackendNotInstalled(why)
