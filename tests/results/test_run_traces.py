"""Traces of a run as text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.run_folders import EVENTS, TRACE, wrote
from unipar.errors import ReportError
from unipar.results.run_traces import read_traces


def step(number: int, seconds: float) -> dict[str, Any]:
    return {**EVENTS[3], "step": number, "seconds": seconds}


def others(folder: Path, *events: dict[str, Any]) -> float | None:
    wrote(folder, 0, [EVENTS[0], *events, TRACE])
    (trace,) = read_traces(folder)
    return trace.others


def test_a_trace_as_text(tmp_path: Path) -> None:
    """Steps and cost in sentences, then each entry with its share of those listed; long names are cut."""
    wrote(tmp_path, 0, [EVENTS[0], step(2, 0.2), TRACE])
    (trace,) = read_traces(tmp_path)
    assert trace.file == tmp_path / "trace/rank-0.json.gz"
    assert trace.table() == (
        "steps 3 to 4 of rank 0\n"
        "a traced step took 300 ms, another one 200 ms (median): 1.50 times\n"
        "\n"
        "largest entries, CPU                                calls  own time  of all listed\n"
        "aten::mm                                            1,200    300 ms            75%\n"
        "a graph with a long name a graph with a long na...      2    100 ms            25%"
    )


def test_other_steps_are_those_of_rows_without_a_traced_one(tmp_path: Path) -> None:
    """The first step is none of them, and rows of several steps count only if none was traced."""
    assert others(tmp_path, step(1, 9.0), step(2, 0.2), step(4, 8.0), step(5, 0.4), step(6, 0.3)) == 0.3
    assert others(tmp_path, step(1, 9.0), step(5, 7.0)) == 0.25
    assert others(tmp_path, {"event": "untraced", "time": 1.0, "seconds": 0.5}, step(2, 0.2)) == 0.5


def test_no_other_step(tmp_path: Path) -> None:
    """The sentence says that none was timed."""
    wrote(tmp_path, 0, [EVENTS[0], {**TRACE, "before": None, "first": 4}])
    (trace,) = read_traces(tmp_path)
    assert (trace.title, trace.cost) == ("step 4 of rank 0", "a traced step took 300 ms; no other step was timed")


def test_the_last_trace_of_a_rank(tmp_path: Path) -> None:
    """An earlier attempt's file was replaced; its steps were traced all the same."""
    wrote(tmp_path, 0, [EVENTS[0], {**TRACE, "first": 1, "step": 2}, step(2, 5.0), step(5, 0.4), TRACE])
    wrote(tmp_path, 1, [EVENTS[0], TRACE])
    first, second = read_traces(tmp_path)
    assert (first.rank, first.first, first.last, first.others, second.rank) == (0, 3, 4, 0.25, 1)


def test_folders_without_a_trace(tmp_path: Path) -> None:
    """Each error says what to do."""
    sentences: list[str] = []
    (tmp_path / "compare/single/trace").mkdir(parents=True)
    run, said = tmp_path / "run", {"event": "no trace", "time": 1.0, "said": "another profile is being recorded"}
    for place, events in ((tmp_path / "nowhere", None), (tmp_path, None), (run, EVENTS), (run, [*EVENTS, said])):
        if events is not None:
            run.mkdir(exist_ok=True)
            wrote(place, 0, events)
        with pytest.raises(ReportError) as e:
            read_traces(place)
        sentences.append(str(e.value).replace(str(tmp_path), "X"))
    assert sentences == [
        "X/nowhere holds no run (rank-0.jsonl); give a run folder",
        "X holds no run (rank-0.jsonl); name one of the folders in it: X/compare/single",
        "X/run has no trace, which a run writes with log.trace, such as --set 'log.trace={steps: [10, 12]}'",
        "X/run has no trace: another profile is being recorded",
    ]
