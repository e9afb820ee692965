"""Reports of run folders, and the tables that show them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.run_folders import EVENTS, EXPERTS, wrote
from unipar.results.run_report import Report
from unipar.utils.table import format_table
from unipar.utils.text import count_of, format_duration, format_size


@pytest.fixture
def run(tmp_path: Path) -> Path:
    wrote(tmp_path, 0, EVENTS)
    wrote(tmp_path, 1, [EVENTS[0], {"event": "end", "time": 106.0, "steps": 12, "peak_rss": 5 * 2**20}])
    return tmp_path


def test_everything_comes_from_the_run_logs(run: Path) -> None:
    """Each kind of event ends up in the field that is named for it."""
    report = Report.read(run)
    assert (report.out, report.strategy, report.size, report.parameters) == (run, "native/nothing", 2, 8_926_848)
    assert (report.steps, report.seconds, report.stopped) == (12, 6.0, None)
    assert report.losses == [(1, 4.5), (10, 3.25)]
    assert report.norms == [(1, 2.0)]
    assert report.rates == [(1, 1e-3), (10, 1e-3)]
    assert report.evals == [(10, {"loss": 3.5, "accuracy": 0.25})]
    assert report.logs == [(1, {"tokens": 512})]
    assert report.peak_rss == [3 * 2**20, 5 * 2**20]


def test_a_report_prints_as_a_few_lines(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`print(launch(...))` says what was trained, how long, to which loss, and where it lies."""
    monkeypatch.chdir(run.parent)  # the text is as wide as a terminal, whatever the folder's path
    text = str(Report.read(Path(run.name))).replace(run.name, "RUN")
    assert text == (
        "strategy    native/nothing, 2 ranks\n"
        "parameters  8,926,848\n"
        "steps       12\n"
        "time        6.0 s from the first event to the last\n"
        "loss        4.5000 at step 1, 3.2500 at step 10\n"
        "evaluation  loss 3.5000, accuracy 0.2500 at step 10\n"
        "peak RSS    5.0 MiB on the largest rank\n"
        "folder      RUN"
    )


def test_experts_in_a_report(tmp_path: Path) -> None:
    """The last logged step's tokens are in one line: fullest expert with its layer, fullest rank, unused experts."""
    wrote(tmp_path, 0, [*EVENTS[:3], {**EVENTS[3], "experts": EXPERTS}, *EVENTS[4:]])
    report = Report.read(tmp_path)
    assert report.experts == [(10, EXPERTS)]
    line = (
        "the fullest got 3.00 times an even share (a), the fullest rank 2.00 times, 2 experts got no token at step 10"
    )
    assert line in " ".join(report.table().split())


def test_where_a_run_is(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`folder` is absolute, and a run that has saved nothing has no checkpoint."""
    monkeypatch.chdir(run.parent)
    report = Report.read(Path(run.name))
    assert (report.folder, report.checkpoint) == (run, None)


def test_rates_of_parts(tmp_path: Path) -> None:
    """Each part has a rate of its own."""
    parts = {"actor": {"step": 1, "loss": 1.0, "lr": 0.5}, "critic": {"step": 1, "loss": 1.0, "lr": 0.25}}
    wrote(tmp_path, 0, [EVENTS[0], {"event": "step", "time": 101.0, "step": 1, "loss": 2.0, "parts": parts}])
    assert Report.read(tmp_path).rates == [(1, {"actor": 0.5, "critic": 0.25})]


def test_a_run_that_was_cut_short_is_a_report_too(tmp_path: Path) -> None:
    """A rank that died leaves half a line; all before it counts."""
    wrote(tmp_path, 0, EVENTS[:2])
    with (tmp_path / "rank-0.jsonl").open("a") as file:
        file.write('{"event": "step", "step": 2, "lo')
    report = Report.read(tmp_path)
    assert (report.steps, report.losses, report.peak_rss) == (1, [(1, 4.5)], [])


def test_a_stopped_run_says_so(tmp_path: Path) -> None:
    """A signal's step is kept apart from the steps that logged."""
    wrote(tmp_path, 0, [*EVENTS[:2], {"event": "stopped", "time": 105.0, "step": 7}])
    report = Report.read(tmp_path)
    assert (report.steps, report.stopped) == (7, 7)
    assert "steps       7, stopped by a signal after step 7\ntime        5.0 s from the first event" in str(report)


def test_ranks_are_read_by_number(tmp_path: Path) -> None:
    """rank-10 comes after rank-2, not before it."""
    for rank in (0, 2, 10, 1):
        wrote(tmp_path, rank, [{"event": "end", "time": 1.0, "steps": 1, "peak_rss": rank + 1}])
    assert Report.read(tmp_path).peak_rss == [1, 2, 3, 11]


def test_a_folder_without_a_run_is_an_error_that_names_it(tmp_path: Path) -> None:
    """The file that was looked for is in the message."""
    with pytest.raises(FileNotFoundError, match=r"holds no run: there is no rank-0\.jsonl in it"):
        Report.read(tmp_path)


def test_a_short_row_is_a_sentence_that_wraps(tmp_path: Path) -> None:
    """The last strategy of a row that ends early takes the rest of the line, and no line is wider than asked."""
    text = format_table(
        ("strategy", "ms", "rate"),
        [("single", "212", "38"), ("horovod/nothing", "not installed: one two three four five six seven eight")],
        right=(1, 2),
        width=44,
    )
    assert text.splitlines() == [
        "strategy          ms  rate",
        "single           212    38",
        "horovod/nothing  not installed: one two",
        "                 three four five six seven",
        "                 eight",
    ]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.00038, "380 us"), (0.0042, "4.2 ms"), (0.21, "210 ms"), (3.14, "3.1 s"), (59.9, "60 s"), (125, "2 min 05 s")],
)
def test_durations_have_two_or_three_figures(seconds: float, text: str) -> None:
    """The unit follows the size."""
    assert format_duration(seconds) == text


def test_one_is_one() -> None:
    """Not 1 steps."""
    assert (count_of(1, "step"), count_of(2, "step"), count_of(0, "step")) == ("1 step", "2 steps", "0 steps")


@pytest.mark.parametrize(("count", "text"), [(900, "900 B"), (612 * 2**20, "612 MiB"), (3.2 * 2**30, "3.2 GiB")])
def test_bytes_are_shown_in_binary_units(count: float, text: str) -> None:
    """Sizes are in KiB, MiB and GiB."""
    assert format_size(count) == text
