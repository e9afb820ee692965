"""Commands in the test's own process; imports of all libraries, which `backends` and `doctor` both try first."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.support.forks import Forks
from unipar.backend import installed, registry
from unipar.backend.installed import ImportProbe
from unipar.cli import app


class Answer:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def unipar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a command in this process."""

    def typed(*words: str) -> Answer:
        monkeypatch.setattr(sys, "argv", ["unipar", *words])
        with pytest.raises(SystemExit) as e:
            app.main()
        told = capsys.readouterr()
        return Answer(int(e.value.code or 0), told.out, told.err)

    return typed


VERSION = "import sys; from unipar.backend.registry import find_backend; print(find_backend(sys.argv[1]).version())"


def _probe(forks: Forks, name: str) -> ImportProbe:
    if why := registry.why_not_installed(registry.find_backend(name)):
        return ImportProbe(absent=why)
    return ImportProbe(version=forks.python(["-c", VERSION, name], Path.cwd()).stdout.splitlines()[-1])


@pytest.fixture(scope="session")
def _probes(forks: Forks) -> dict[str, ImportProbe]:
    return {name: _probe(forks, name) for name in registry.backend_names()}


@pytest.fixture
def probed(_probes: dict[str, ImportProbe], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every backend's library is really imported, as its fork says, once for all tests that ask for it.

    Tests of libraries that do not import start a process for each, as the commands do.
    """

    def seen(names: Iterable[str]) -> dict[str, ImportProbe]:
        return {name: _probes[name] for name in names}

    monkeypatch.setattr(installed, "probe_imports", seen)
