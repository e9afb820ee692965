"""`unipar backends`: what is there, what is not, and what is there and broken."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from unipar.backend import installed, registry
from unipar.backend.installed import ImportProbe
from unipar.cli.commands import backends
from unipar.cli.commands import backends as commands_backends
from unipar.cli.commands.backends import BackendRow

PLUGIN = """
from unipar.backend import Backend, Capabilities
import os

class {name}(Backend):
    name = "{name}"
    requires = ("{name}_library",)
    hint = "pip install {name}"
    capabilities = Capabilities(shards=("nothing",))
    def dtypes(self, config): ...
    def join(self, config, place): ...
    def build(self, part, config, world): ...

backend = {name}()
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A stranger's backend, installed in a folder on the path; its library is the test's to write."""
    (tmp_path / "toy.py").write_text(PLUGIN.format(name="toy"), encoding="utf-8")
    info = tmp_path / "toy-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text("[unipar.backends]\ntoy = toy:backend\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    registry.find_backend.cache_clear()
    yield tmp_path
    registry.find_backend.cache_clear()
    sys.modules.pop("toy", None)


@pytest.mark.usefixtures("probed")
def test_all_of_ours_are_installed() -> None:
    """Set-up brings every backend: each has a version, strategies and a line that installs it."""
    rows = {row.name: row for row in backends.rows()}
    assert {name for name, row in rows.items() if row.installed} >= {
        "single",
        "native",
        "deepspeed",
        "horovod",
        "accelerate",
    }
    assert rows["horovod"].version == "horovod 0.28.1"
    assert rows["horovod"].install == "unipar install horovod"
    assert rows["native"].strategies == [
        *("native/nothing", "native/optimizer", "native/gradients", "native/parameters", "native/nothing+dp")
    ]
    assert rows["native"].install == "it comes with unipar"
    assert "parameters/fp64" in rows["deepspeed"].gaps


def test_a_library_that_is_missing(plugin: Path) -> None:
    """Said without importing anything, with the way out."""
    assert installed.probe_imports(["toy"])["toy"] == ImportProbe(
        absent="backend 'toy' needs toy_library, not installed here: pip install toy"
    )


def test_a_library_that_is_broken(plugin: Path) -> None:
    """The library's own error is the reason."""
    (plugin / "toy_library.py").write_text("raise ImportError('libcudart.so.11: no such file')", encoding="utf-8")
    assert installed.probe_imports(["toy"])["toy"] == ImportProbe(broken="ImportError: libcudart.so.11: no such file")


def test_a_library_that_crashes(plugin: Path) -> None:
    """A crash ends the probe's process, not this one."""
    (plugin / "toy_library.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", encoding="utf-8")
    assert installed.probe_imports(["toy"])["toy"] == ImportProbe(
        broken="importing the library of toy was killed by SIGSEGV"
    )


def test_a_library_that_hangs(plugin: Path) -> None:
    """The probe gives up after a time limit."""
    (plugin / "toy_library.py").write_text("import time; time.sleep(60)", encoding="utf-8")
    assert installed.probe_imports(["toy"], patience=0.5)["toy"] == ImportProbe(
        broken="importing the library of toy took longer than 0.5 s"
    )


def test_a_library_that_talks(plugin: Path) -> None:
    """Output of the import is not taken for the version."""
    (plugin / "toy_library.py").write_text("print('hello', end=''); __version__ = '2.5'", encoding="utf-8")
    assert installed.probe_imports(["toy"])["toy"] == ImportProbe(version="toy_library 2.5")


ROWS = [
    BackendRow(
        "toy",
        True,
        "toy 2.5",
        None,
        "pip install toy",
        ["toy/nothing"],
        ["cpu"],
        {"cpu": ""},
        {"fp64": "it has none"},
        {"toy/nothing": "toys"},
    ),
    BackendRow(
        "lost",
        False,
        None,
        "ImportError: no (install it again: x)",
        "x",
        ["lost/nothing"],
        ["cpu", "cuda", "xpu"],
        {"cpu": "", "cuda": "emulated"},
        {},
    ),
]


def test_plain_lines_in_a_pipe(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """No boxes and no colours."""
    monkeypatch.setattr(commands_backends, "rows", lambda: ROWS)
    backends.list_backends()
    assert capsys.readouterr().out == (
        "backend  what\n"
        "toy      library     toy 2.5\n"
        "         strategies  toy/nothing (toys)\n"
        "         devices     cpu\n"
        "         no fp64     it has none\n"
        "lost     library     ImportError: no (install it again: x)\n"
        "         strategies  lost/nothing\n"
        "         devices     cpu, cuda (emulated), xpu (never tried)\n"
    )


def test_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Every field, for programs."""
    monkeypatch.setattr(commands_backends, "rows", lambda: ROWS)
    backends.list_backends(as_json=True)
    told = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in told] == ["toy", "lost"]
    assert told[1]["why"] == "ImportError: no (install it again: x)"
