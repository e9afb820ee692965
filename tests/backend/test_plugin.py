"""A backend from outside the tree is found, described and held to the suite like ours."""

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
    """Its entry point is enough: `unipar backends` lists it."""
    out = _run("-m", "unipar", "backends")
    assert out.returncode == 0
    assert "toy/nothing" in out.stdout


def test_suite() -> None:
    """It passes the conformance suite in worlds of 2, with marks that it brings itself."""
    words = ("-m", "pytest", "tests/conformance", "-q", "-p", "no:cacheprovider", "--cells", "toy")
    out = _run(*words, "--marks", "tests/support/toy/marks.toml", "-k", "nothing-2-")
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
    """A mark cannot outlive the backend that it names."""
    text = (TOY / "marks.toml").read_text("utf-8").replace("toy/*", "troy/*")
    (tmp_path / "marks.toml").write_text(text, "utf-8")
    out = _run("-m", "pytest", "tests/conformance", "-q", "--cells", "toy", "--marks", str(tmp_path / "marks.toml"))
    assert out.returncode == 2
    assert "a never mark names ['troy/*']" in out.stdout


def test_what_it_has_no_file_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A description that names no script and no config of its library refuses both in a sentence."""
    monkeypatch.syspath_prepend(TOY)
    toy: Any = import_module("toy_backend").backend
    with pytest.raises(Unsupported) as e:
        toy.script(None)
    assert str(e.value) == "toy: there is no script for it; `unipar export --help` names those that have one"
    assert toy.foreign_keys() == frozenset()
    with pytest.raises(Unsupported) as e:
        toy.read_foreign(None, {})
    assert str(e.value) == "toy: it has no config of its own that could be read"
