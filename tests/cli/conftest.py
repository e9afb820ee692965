"""Imports of all libraries, which `unipar backends` and `unipar doctor` both try first; they take some seconds."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from unipar.backend import installed, registry
from unipar.backend.installed import ImportProbe


@pytest.fixture(scope="session")
def _probes() -> dict[str, ImportProbe]:
    return installed.probe_imports(registry.backend_names())


@pytest.fixture
def probed(_probes: dict[str, ImportProbe], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every backend's library is really imported in a process of its own, once for all tests that ask for it."""

    def seen(names: Iterable[str]) -> dict[str, ImportProbe]:
        return {name: _probes[name] for name in names}

    monkeypatch.setattr(installed, "probe_imports", seen)
