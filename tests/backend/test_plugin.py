"""Backends from outside the tree: found, described and tested like those of unipar."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from unipar.errors import Unsupported

ROOT = Path(__file__).parents[2]
TOY = ROOT / "tests" / "support" / "toy"


def _run(*words: str, path: Path = TOY) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(path), "COLUMNS": "120"}
    return subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


def test_found() -> None:
    """An entry point is enough for `unipar backends` to list a backend."""
    out = _run("-m", "unipar", "backends")
    assert out.returncode == 0
    assert "toy/nothing" in out.stdout


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param("nothing-2-", marks=pytest.mark.sweep, id="every case"),
        pytest.param("nothing-2- and (bf16 or tied or ragged or state or parts)", id="some cases"),
    ],
)
def test_suite(cases: str) -> None:
    """An outside backend passes the conformance suite in worlds of 2, with marks of its own."""
    words = ("-m", "pytest", "tests/conformance", "-q", "-p", "no:cacheprovider", "--cells", "toy")
    out = _run(*words, "--marks", "tests/support/toy/marks.toml", "-k", cases)
    assert out.returncode == 0, out.stdout[-3000:]
    assert "4 xfailed" in out.stdout.splitlines()[-1]


def test_a_lying_mark_fails(tmp_path: Path) -> None:
    """A mark for what the backend can do fails the suite."""
    text = (TOY / "marks.toml").read_text("utf-8").replace('cases = ["', 'cases = ["tied weights", "')
    (tmp_path / "marks.toml").write_text(text, "utf-8")
    words = ("-m", "pytest", "tests/conformance", "-q", "-p", "no:cacheprovider", "--cells", "toy", "-k", "2-tied")
    out = _run(*words, "--marks", str(tmp_path / "marks.toml"))
    assert out.returncode == 1
    assert "[XPASS(strict)] a toy has no masters" in out.stdout


def test_an_unknown_backend_in_a_mark_stops_collection(tmp_path: Path) -> None:
    """A mark that names an unknown backend stops the collection of tests."""
    text = (TOY / "marks.toml").read_text("utf-8").replace("toy/*", "troy/*")
    (tmp_path / "marks.toml").write_text(text, "utf-8")
    out = _run("-m", "pytest", "tests/conformance", "-q", "--cells", "toy", "--marks", str(tmp_path / "marks.toml"))
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
