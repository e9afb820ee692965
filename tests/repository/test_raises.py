"""`make errors`: the places that raise an error, and those whose text says nothing of a way out."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import raises

ROOT = Path(raises.__file__).parents[1]
MOST_WITHOUT_WAY_OUT = 31
"""Texts without a way out, beside those on damaged files of a checkpoint, which end with how to find another."""

SOURCE = """
def f(x):
    raise ConfigError(f"train.steps ({x}) is odd; write an even number")
    raise TaskError("the loss is odd" + f" in {x}")
    raise ValueError("no error of unipar")
    raise
"""


def test_places_are_listed_with_their_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values are {}; errors of other libraries are left out."""
    monkeypatch.setattr(raises, "ROOT", tmp_path)
    (tmp_path / "x.py").write_text(SOURCE, "utf-8")
    first, second = raises.raised_errors([tmp_path / "x.py"])
    assert (first.place, first.error, first.text) == (
        "x.py:3",
        "ConfigError",
        "train.steps ({}) is odd; write an even number",
    )
    assert (second.place, second.text) == ("x.py:4", "the loss is odd in {}")
    assert (first.has_way_out, second.has_way_out) == (True, False)


def test_texts_say_what_to_do() -> None:
    """All but a few, which are the user's own doing or have no way out."""
    files = [file for folder in ("unipar", "backends") for file in (ROOT / folder).rglob("*.py")]
    damaged = ("unipar/checkpoint/format", "unipar/checkpoint/protocol")
    errors = [error for error in raises.raised_errors(sorted(files)) if not error.place.startswith(damaged)]
    without = [error for error in errors if not error.has_way_out]
    assert len(without) <= MOST_WITHOUT_WAY_OUT, "\n".join(f"{error.place}: {error.text}" for error in without)


def test_a_sample_is_drawn_by_a_seed(capsys: pytest.CaptureFixture[str]) -> None:
    """The same places each time, and the count of all."""
    raises.main(["--sample", "3", "--seed", "1"])
    first = capsys.readouterr().out
    raises.main(["--sample", "3", "--seed", "1"])
    assert capsys.readouterr().out == first
    assert len(first.splitlines()) == 4
