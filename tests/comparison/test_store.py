"""The same comparison a second time: results of an earlier run are reused."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.forks import Forks
from tests.support.tiny import CONFIG, Tiny
from tests.support.world import PYTHONPATH_VARIABLE, ROOT, eventually
from unipar.comparison.compare import compare

pytestmark = pytest.mark.forked


def test_a_backend_that_is_still_missing_is_no_reason_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """All that can run has run: the second call starts nothing, changes no row, and says where it has them from."""
    monkeypatch.setattr("unipar.utils.entry_points.find_spec", lambda name: None if name == "horovod" else name)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    asked: dict[str, Any] = CONFIG | {
        "train": {"steps": 7},
        "compare": {"repeat": 2, "memory": False},
        "out": str(tmp_path),
    }
    first = compare(asked, task=Tiny, strategies=("native/nothing", "horovod"))
    assert [row.outcome for row in first.rows] == ["ran", "ran", "absent"]
    capfd.readouterr()
    second = compare(asked, task=Tiny, strategies=("native/nothing", "horovod"))
    assert "starts" not in capfd.readouterr().err
    assert second.rows == first.rows
    assert second.note.startswith(f"from {tmp_path}/compare/compare.json; --overwrite runs it again; page: ")


def test_what_was_watched_is_kept_at_once(tmp_path: Path, forks: Forks) -> None:
    """The command is killed in its first turns: every rank's memory is in compare.json, and on the page."""
    told = CONFIG | {"task": {"use": f"{ROOT}/tests/support/tiny.py:Tiny"}, "out": str(tmp_path / "out")}
    (tmp_path / "x.yaml").write_text(json.dumps(told), encoding="utf-8")
    command = ["-m", "unipar", "compare", str(tmp_path / "x.yaml"), "--strategy", "native/nothing"]
    with forks.begin(command, tmp_path, PYTHONPATH_VARIABLE, memory=True) as going:
        eventually(lambda: "single round 1 of 3" in going.stderr, "no round begins")
        os.kill(going.pid, signal.SIGKILL)
    data = json.loads((tmp_path / "out/compare/compare.json").read_text("utf-8"))
    assert [(row["outcome"], len(row["memory"])) for row in data["strategies"]] == [("waits", 1), ("waits", 2)]
    done = forks.unipar(["report", str(tmp_path / "out")])
    assert done.returncode == 0, done.stderr
    assert "Memory at the peak" in (tmp_path / "out/compare/report.html").read_text("utf-8")
