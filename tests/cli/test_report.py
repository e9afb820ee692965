"""`unipar report` and `unipar runs`: what they print, which folder they take, what they refuse."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.comparisons import write_example_comparison
from tests.support.observations import UNEQUAL, write_observation
from tests.support.run_folders import EVENTS, plain, wrote
from unipar.cli.commands.report import draw_runs
from unipar.results.run_list import list_runs


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_report(unipar: Any, folder: Path) -> None:
    """The command prints the page's path; exit 2 where there is nothing to show."""
    write_example_comparison(folder / "runs/x")
    assert unipar("report", "runs/x").out == "page: runs/x/compare/report.html\n"
    assert unipar("report", "runs/x", "runs/x", "--out", "y.html").out == "page: y.html\n"
    assert Path("y.html").read_text("utf-8").startswith("<!doctype html>")
    write_example_comparison(folder / "runs/z", parameters=1000)
    assert unipar("report", "runs/x", "runs/z").out == (
        "page: runs/z/compare/report.html\nThe two differ: parameters 8,926,848 before, 1,000 now.\n"
    )
    answer = unipar("report", "runs/y")
    assert (answer.code, answer.err) == (2, "unipar: runs/y does not exist; give a run folder\n")


def test_report_of_observed_commands(unipar: Any, folder: Path) -> None:
    """One has a page; two have a table, too; the newest results may be of an observed command."""
    write_observation(folder / "runs/before", findings=(UNEQUAL,))
    write_observation(folder / "runs/after", memory=1.25)
    assert unipar("report", "runs/before").out == "page: runs/before/report.html\n"
    lines = unipar("report", "runs/before", "runs/after").out.splitlines()
    assert lines[:2] == [
        "before: runs/before (observed: DDP, 2 ranks)",
        "after: runs/after (observed: DDP, 2 ranks)",
    ]
    assert lines[-1] == "page: runs/after/report.html"
    for file in (folder / "runs/before").iterdir():
        os.utime(file, (1e8, 1e8))
    assert unipar("report").out == "newest in runs: runs/after\npage: runs/after/report.html\n"
    listed = unipar("runs").out.splitlines()
    assert [line.split()[-2:] for line in listed[1:]] == [["KiB", "ended"], ["1", "fault"]]
    write_example_comparison(folder / "runs/x")
    answer = unipar("report", "runs/before", "runs/x")
    assert (answer.code, answer.err.partition(", and an observed")[0]) == (
        2,
        "unipar: runs/x holds a comparison of several strategies",
    )


def test_report_of_the_newest(unipar: Any, folder: Path) -> None:
    """Without a folder: the results in runs/ that were written last, whatever page was made last."""
    answer = unipar("report")
    assert (answer.code, answer.err) == (
        2,
        "unipar: there is no folder runs here: "
        "train first (unipar run FILE), or name a run folder (unipar report RUN)\n",
    )
    (folder / "runs/empty").mkdir(parents=True)
    answer = unipar("report")
    assert (answer.code, answer.err) == (
        2,
        "unipar: runs holds no results yet: train first (unipar run FILE), or name a run folder (unipar report RUN)\n",
    )
    for when, name in ((1e9, "new"), (1e8, "old")):
        for file in plain(folder / "runs" / name).iterdir():
            os.utime(file, (when, when))
    assert unipar("report", "runs/old").code == 0
    assert unipar("report").out == "newest in runs: runs/new\npage: runs/new/report.html\n"
    write_example_comparison(folder / "runs/old")
    newest = "newest in runs: runs/old\npage: runs/old/compare/report.html\npage: runs/old/report.html\n"
    assert unipar("report").out == newest
    assert unipar("report", "--out", "y.html").out == "newest in runs: runs/old\npage: y.html\n"


def test_runs(unipar: Any, folder: Path) -> None:
    """A line for each into a pipe, with the sentence at its end; JSON when asked for; a table on a terminal."""
    answer = unipar("runs")
    assert (answer.code, answer.err) == (
        2,
        "unipar: runs does not exist: train first (unipar run FILE), or name a folder with runs\n",
    )
    (folder / "runs").mkdir()
    assert unipar("runs").out == "runs holds no runs\n"
    plain(folder / "runs/train")
    (plain(folder / "runs/train-2") / "rank-0.jsonl").write_text("[]\n", "utf-8")
    listed = unipar("runs").out.splitlines()
    assert [line.split() for line in listed[:2]] == [
        ["run", "strategy", "ranks", "steps", "loss", "took", "size", "state"],
        ["train", "native/nothing", "2", "12/12", "3.2500", "6.0", "s", "16", "KiB", "ended"],
    ]
    broken = "runs/train-2/rank-0.jsonl cannot be read as a rank's run log: one of its lines is not an event"
    assert listed[2].endswith(f" unreadable: {broken}")
    told = json.loads(unipar("runs", "--json").out)
    assert [(entry["name"], entry["state"], entry["seconds"]) for entry in told] == [
        *(("train", "ended", 6.0), ("train-2", "unreadable", None))
    ]
    assert unipar("runs", "runs/train").out.splitlines()[1].split() == listed[1].split()


def runs_with_speed(folder: Path) -> None:
    """A run that counts tokens, one that counts samples, and one that says neither."""
    (folder / "runs").mkdir()
    for name, did in (
        ("words", {"samples_per_second": 40.0, "tokens_per_second": 2560.0, "mfu": 0.25}),
        ("images", {"samples_per_second": 12.34}),
        ("older", {}),
    ):
        wrote(plain(folder / "runs" / name), 0, [*EVENTS[:3], {**EVENTS[3], **did}, *EVENTS[4:]])


def test_runs_have_their_speed(unipar: Any, folder: Path) -> None:
    """Tokens a second where the task has a weight, else samples; JSON has all that the run log says."""
    runs_with_speed(folder)
    listed = [re.split("  +", line) for line in unipar("runs").out.splitlines()]
    assert [line[5:7] for line in listed] == [
        ["speed", "MFU"],
        ["12.3 samples/s", "-"],
        ["-", "-"],
        ["2,560 tokens/s", "25.0%"],
    ]
    assert {run["name"]: run["speed"] for run in json.loads(unipar("runs", "--json").out)} == {
        "words": {"samples_per_second": 40.0, "tokens_per_second": 2560.0, "mfu": 0.25},
        "images": {"samples_per_second": 12.34},
        "older": {},
    }


@pytest.mark.parametrize(
    ("width", "head"),
    [
        (100, "run strategy ranks steps loss speed MFU took size state"),
        (84, "run strategy ranks steps loss speed took size state"),
        (80, "run strategy ranks steps loss speed took state"),
        (60, "run strategy ranks steps loss took state"),
    ],
)
def test_a_narrow_terminal_has_fewer_columns(
    width: int, head: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """MFU goes first, then the size on disk, then the speed."""
    monkeypatch.setenv("COLUMNS", str(width))
    runs_with_speed(folder)
    draw_runs(list_runs(folder / "runs"))
    lines = capsys.readouterr().out.splitlines()
    assert " ".join(lines[1].split()) == head
    assert len(lines) == 7  # no text goes on in a further line
    assert max(map(len, lines)) <= width


def test_runs_on_a_terminal(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A table of at most 80 columns; sentences below it."""
    monkeypatch.setenv("COLUMNS", "80")
    (folder / "runs").mkdir()
    run = plain(folder / "runs/a-long-name-of-a-run-2")
    (run / "rank-0.error.json").write_text(
        json.dumps({"time": 107.0, "kind": "KeyError", "message": "'labels'", "traceback": ""}), "utf-8"
    )
    settled = {"strategy": "deepspeed/gradients+library", "size": 2, "event": "start", "time": 100.0}
    wrote(run, 0, [settled, {"event": "step", "time": 105.0, "step": 99_000, "of": 100_000, "loss": 3.25}])
    draw_runs(list_runs(folder / "runs"))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    text = " ".join(" ".join(lines).split())
    for part in ("run strategy ranks steps loss took state", "99000/100000", "3.2500", "7.0 s", "failed"):
        assert part in text
    assert lines[-1] == "a-long-name-of-a-run-2: rank 0 failed: KeyError: 'labels'"
