"""Registry of installed backends and of their launchers."""

from __future__ import annotations

from functools import cache
from itertools import chain

from unipar.backend.description import Backend
from unipar.config.foreign_words import advise_on_strategy
from unipar.distributed.known_launchers import KNOWN_LAUNCHERS
from unipar.distributed.launchers import Launcher
from unipar.errors import BackendNotFound
from unipar.utils.entry_points import PluginGroup

BACKENDS = PluginGroup[Backend](
    "unipar.backends", "backend", "backend {!r}", "an instance of Backend", Backend, BackendNotFound, advise_on_strategy
)
"""Group of entry points under which packages register their backends."""


def backend_names() -> list[str]:
    """Return the names of all backends that are installed."""
    return BACKENDS.names()


@cache
def find_backend(name: str) -> Backend:
    """Return the description of a backend; its library may be missing."""
    return BACKENDS.find(name)


def why_not_installed(backend: Backend) -> str | None:
    """Return why the backend's library cannot be loaded, or None. Imports nothing."""
    return BACKENDS.missing(backend.name, backend.requires, backend.hint)


def list_launchers() -> list[Launcher]:
    """Return the launchers that every backend may be started by, and those of all installed backends."""
    theirs = (find_backend(name).capabilities.launchers for name in backend_names())
    return [*KNOWN_LAUNCHERS, *chain.from_iterable(theirs)]
