"""`unipar trace`: what it prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.run_folders import EVENTS, TRACE, wrote


def test_trace(unipar: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text of each rank with its file; as JSON; exit 2 without a trace."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    for rank in (0, 1):
        wrote(tmp_path / "run", rank, [EVENTS[0], {**TRACE, "file": f"trace/rank-{rank}.json.gz"}])
    text = unipar("trace", "run").out
    assert text.startswith(
        "steps 3 to 4 of rank 0\na traced step took 300 ms, another one 250 ms (median): 1.20 times\n"
    )
    assert text.endswith(
        "\nrun/trace/rank-1.json.gz: open the file at ui.perfetto.dev, which keeps it in the browser\n\n"
    )
    first, second = json.loads(unipar("trace", "run", "--json").out)
    assert (first["rank"], first["last"], first["file"]) == (0, 4, "run/trace/rank-0.json.gz")
    assert second["entries"][0] == {"name": "aten::mm", "calls": 1200, "seconds": 0.3}
    answer = unipar("trace", "nowhere")
    assert (answer.code, answer.err) == (2, "unipar: nowhere holds no run (rank-0.jsonl); give a run folder\n")
