"""Backends from outside the tree: found, described and tested like those of unipar."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.support.forks import PYTEST_WORDS, Forks
from unipar.backend import installed
from unipar.backend.installed import ImportProbe
from unipar.cli.commands import backends
from unipar.errors import Unsupported

ROOT = Path(__file__).parents[2]
TOY = ROOT / "tests" / "support" / "toy"


SUITE = (*PYTEST_WORDS, "tests/conformance", "--strategies", "toy", "--marks")


@pytest.fixture
def run(forks: Forks) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run `python WORDS...` where the toy is installed."""
    return lambda *words: forks.python(words, ROOT, {"PYTHONPATH": str(TOY), "COLUMNS": "120"})


Run = Callable[..., subprocess.CompletedProcess[str]]


def test_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry point is enough for `unipar backends` to list a backend."""
    monkeypatch.syspath_prepend(TOY)

    def probe(names: Sequence[str]) -> dict[str, ImportProbe]:
        return {name: ImportProbe(version=f"{name} 1") for name in names}

    monkeypatch.setattr(installed, "probe_imports", probe)
    words = [line.split() for line in backends.format_backends(backends.rows()).splitlines()]
    assert words[words.index(["toy", "library", "toy", "1"]) + 1] == ["strategies", "toy/nothing"]


@pytest.mark.sweep
def test_found_by_the_command(run: Run) -> None:
    """And its library is imported, like all others, to learn the version."""
    out = run("-m", "unipar", "backends")
    assert out.returncode == 0
    assert "toy/nothing" in out.stdout


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param("nothing-2-", marks=pytest.mark.sweep, id="every case"),
        pytest.param("nothing-2- and (bf16 or tied or ragged or state or parts)", id="some cases"),
    ],
)
def test_suite(cases: str, run: Run) -> None:
    """An outside backend passes the conformance suite in worlds of 2, with marks of its own."""
    out = run(*SUITE, "tests/support/toy/marks.toml", "-k", cases)
    assert out.returncode == 0, out.stdout[-3000:]
    assert "7 xfailed" in out.stdout.splitlines()[-1]


def test_a_lying_mark_fails(tmp_path: Path, run: Run) -> None:
    """A mark for what the backend can do fails the suite."""
    text = (TOY / "marks.toml").read_text("utf-8").replace('cases = ["', 'cases = ["tied weights", "')
    (tmp_path / "marks.toml").write_text(text, "utf-8")
    out = run(*SUITE, str(tmp_path / "marks.toml"), "-k", "2-tied")
    assert out.returncode == 1
    assert "[XPASS(strict)] a toy has no masters" in out.stdout


def test_an_unknown_backend_in_a_mark_stops_collection(tmp_path: Path, run: Run) -> None:
    """A mark that names an unknown backend stops the collection of tests."""
    text = (TOY / "marks.toml").read_text("utf-8").replace("toy/*", "troy/*")
    (tmp_path / "marks.toml").write_text(text, "utf-8")
    out = run(*SUITE, str(tmp_path / "marks.toml"))
    assert out.returncode == 2
    assert "a never mark names ['troy/*']" in out.stdout


def test_what_it_has_no_file_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A description without a script and without a config of its library refuses both in a sentence."""
    monkeypatch.syspath_prepend(TOY)
    toy: Any = import_module("toy_backend").backend
    with pytest.raises(Unsupported) as e:
        toy.script(None)
    assert str(e.value) == "toy: this backend has no script; `unipar export --help` lists the backends that have one"
    assert toy.foreign_keys() == frozenset()
    with pytest.raises(Unsupported) as e:
        toy.read_foreign(None, {})
    assert str(e.value) == "toy: this backend's library has no config that unipar can read"
