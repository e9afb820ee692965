"""A comparison that is asked for again: what an earlier go has left is not run twice, nor called what it is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.tiny import CONFIG, Tiny
from unipar import registry
from unipar.verbs.compare import compare


def test_a_backend_that_is_still_missing_is_no_reason_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """All that can run has run: the second call starts nothing, changes no row, and says where it has them from."""
    monkeypatch.setattr(registry, "find_spec", lambda name: None if name == "horovod" else name)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    asked: dict[str, Any] = CONFIG | {
        "train": {"steps": 7},
        "compare": {"repeat": 2, "memory": False},
        "out": str(tmp_path),
    }
    first = compare(asked, task=Tiny, cells=("native/nothing", "horovod"))
    assert [row.outcome for row in first.rows] == ["ran", "ran", "absent"]
    capfd.readouterr()
    second = compare(asked, task=Tiny, cells=("native/nothing", "horovod"))
    assert "starts" not in capfd.readouterr().err
    assert second.rows == first.rows
    assert second.note.startswith(f"from {tmp_path}/compare/compare.json; --overwrite runs it again; page: ")
