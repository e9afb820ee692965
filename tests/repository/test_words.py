"""Docs, help, errors and pages of reports are in plain words: none of the patterns of tools/words.py is in them."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from tools import words

NOT_YET_DOCS: frozenset[str] = frozenset(
    {
        "docs/averages.md",
        "docs/checkpoint-format.md",
        "docs/checkpoints.md",
        "docs/compare.md",
        "docs/deepspeed-or-fsdp2.md",
        "docs/examples.md",
        "docs/from-accelerate.md",
        "docs/from-ddp.md",
        "docs/from-deepspeed.md",
        "docs/from-fabric.md",
        "docs/from-hf-trainer.md",
        "docs/from-torchtune.md",
        "docs/launchers.md",
        "docs/machines.md",
        "docs/memory.md",
        "docs/mesh-models.md",
        "docs/mesh.md",
        "docs/one-gpu-to-many.md",
        "docs/performance.md",
        "docs/plan.md",
        "docs/report.md",
        "docs/runs.md",
        "docs/scale-out.md",
        "docs/scale.md",
        "docs/silent-errors.md",
        "docs/tasks.md",
        "docs/tutorial.md",
        "docs/verify.md",
        "docs/why-is-my-loss-different.md",
    }
)
"""Pages that are to be rewritten. Leave a page out as soon as it has no hit: a test says so."""

NOT_YET_SOURCES: frozenset[str] = frozenset()
"""Files whose errors or page texts are to be rewritten."""

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
    assert [str(hit) for hit in hits if hit.place not in NOT_YET_DOCS] == []
    assert {hit.place for hit in hits} >= {page for page in NOT_YET_DOCS if (words.ROOT / page).exists()}


def test_help_and_keys_are_plain() -> None:
    """`--help` of every command, and the meaning of every key."""
    assert [*map(str, words.help_hits()), *map(str, words.key_hits())] == []


def test_errors_are_plain() -> None:
    """Texts of what unipar and its backends raise."""
    hits = words.source_hits(("unipar", "backends"), raised=True)
    files = Counter(hit.place.rpartition(":")[0] for hit in hits)
    assert [str(hit) for hit in hits if hit.place.rpartition(":")[0] not in NOT_YET_SOURCES] == []
    assert {file for file in NOT_YET_SOURCES if not file.startswith("unipar/report/")} <= set(files)


def test_pages_of_reports_are_plain() -> None:
    """Texts of the pages that `compare`, `verify` and `report` write."""
    hits = words.source_hits(("unipar/report",), raised=False)
    files = Counter(hit.place.rpartition(":")[0] for hit in hits)
    assert [str(hit) for hit in hits if hit.place.rpartition(":")[0] not in NOT_YET_SOURCES] == []
    assert {file for file in NOT_YET_SOURCES if file.startswith("unipar/report/")} <= set(files)


def test_errors_are_read_where_they_are_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of an f-string as one text, and neither docstrings nor keys."""
    (tmp_path / "unipar").mkdir()
    (tmp_path / "unipar/x.py").write_text(
        'def f(n):\n    """Told by nobody: what is told."""\n    raise ValueError(f"a file that lacks {n} names")\n',
        "utf-8",
    )
    monkeypatch.setattr(words, "ROOT", tmp_path)
    assert [hit.place for hit in words.source_hits(["unipar"], raised=True)] == ["unipar/x.py:3"]
