"""Docs, help, errors and pages of reports are in plain words: none of the patterns of tools/words.py is in them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools import words

PLANTED = {
    "Of 32 errors all are found.": "an inversion",
    "So it is for GPUs.": "an inversion",
    "What cannot be is refused.": "a clause as the subject",
    "Has the folder changed, the run starts anew.": "an inversion for a condition",
    "Is it so?": "a question",
    "This is told as assumed.": "reported",
    "There are so many ranks on it.": "a number",
    "One that lacks a name is refused.": "missing",
    "It begins with the newest whole checkpoint.": "full, complete",
    "A ledger holds the losses.": "a private word",
    "The feed of a rank ends.": "a loader",
    "The fault is mended since then.": "history",
    "Measured while the machine was busy with other programs.": "circumstances",
}
"""A sentence for each kind of pattern, and the beginning or a part of the reason that must be given."""

PLAIN = """
# What has run where

If X changed, the run starts anew. What is split? See `told`, the share of a rank, and:

    Of code, nothing is read.

- A whole number, the whole model on one rank, a feed-forward layer.
- Is `parallel.data` set? Then it counts.
"""
"""Plain text that looks like what is forbidden."""


@pytest.mark.parametrize(("sentence", "reason"), PLANTED.items())
def test_a_planted_sentence_is_reported(sentence: str, reason: str, tmp_path: Path) -> None:
    """In the middle of a paragraph of a page, with its reason."""
    page = tmp_path / "page.md"
    page.write_text(f"# Page\n\nThe first sentence is plain. {sentence} The last one\nis plain too.\n", "utf-8")
    hits = list(words.hits_in(words.prose_of(page.read_text("utf-8")), "page.md"))
    assert [reason in hit.reason for hit in hits] == [True], hits


def test_plain_text_is_not_reported() -> None:
    """Neither headings, questions, code, nor a tensor that is not split."""
    assert list(words.hits_in(words.prose_of(PLAIN), "page.md")) == []


def test_every_entry_has_a_reason() -> None:
    """In a few words, and its pattern compiles."""
    assert [pattern for pattern, reason in words.FORBIDDEN.items() if not (re.compile(pattern) and reason)] == []


def test_the_docs_are_plain() -> None:
    """README, tests/README and every page of docs/."""
    hits = [hit for page in words.pages() for hit in words.page_hits(page)]
    assert [str(hit) for hit in hits] == []


def test_help_and_keys_are_plain() -> None:
    """`--help` of every command, and the meaning of every key."""
    assert [*map(str, words.help_hits()), *map(str, words.key_hits())] == []


def test_errors_are_plain() -> None:
    """Texts of what unipar and its backends raise."""
    hits = words.source_hits(("unipar", "backends"), raised=True)
    assert [str(hit) for hit in hits] == []


def test_pages_of_reports_are_plain() -> None:
    """Texts of the pages that `compare`, `verify` and `report` write."""
    hits = words.source_hits(("unipar/report",), raised=False)
    assert [str(hit) for hit in hits] == []


def test_errors_are_read_where_they_are_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of an f-string as one text, and neither docstrings nor keys."""
    (tmp_path / "unipar").mkdir()
    (tmp_path / "unipar/x.py").write_text(
        'def f(n):\n    """Told by nobody: what is told."""\n    raise ValueError(f"a file that lacks {n} names")\n',
        "utf-8",
    )
    monkeypatch.setattr(words, "ROOT", tmp_path)
    assert [hit.place for hit in words.source_hits(["unipar"], raised=True)] == ["unipar/x.py:3"]
