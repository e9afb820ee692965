"""Two comparisons, or two runs, laid over one another: what changed from the first to the second."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from unipar.report.data.comparison import CellPageData, ComparisonPageData
from unipar.report.data.run import RunPageData
from unipar.results.same_training import TrainingMarks
from unipar.utils.text import count_of, format_duration, format_size

IGNORED_KEY_PREFIXES = ("out", "compare.")
"""Keys that say where a run lies, and not what it is."""


def describe_largest_change(before: ComparisonPageData, now: ComparisonPageData) -> str:
    """What became of each cell that is in both, in one line: the one whose memory or time changed most."""
    pairs = [(a, b) for b in now.cells if (a := before.cell(b.cell)) is not None]
    was, held = _peaks(before), _peaks(now)
    said: list[tuple[float, str]] = []
    for cell in held:
        if one := was.get(cell):
            part = held[cell] / one - 1
            said.append(
                (abs(part), f"{cell} holds {_percent(part)} memory ({format_size(one)} to {format_size(held[cell])})")
            )
    times = [
        (abs(part := b.median_seconds / a.median_seconds - 1), f"{b.cell} takes {_percent(part)} time a step")
        for a, b in pairs
        if a.timed and b.timed
    ]
    words = [max(found)[1] for found in (said, times) if found]
    return f"Since {before.folder}: " + (", ".join(words) if words else "no cell is in both") + "."


def _peaks(told: ComparisonPageData) -> dict[str, int]:
    """By cell; of one that failed not all is known."""
    return {cell.cell: cell.peak for cell in told.measured_cells}


def _percent(part: float) -> str:
    return "as much" if abs(part) < 0.0005 else f"{abs(part) * 100:.1f} % {'less' if part < 0 else 'more'}"


def change_rows(before: ComparisonPageData, now: ComparisonPageData) -> list[list[str]]:
    """By cell: memory before and now, time before and now, each with its difference."""
    made: list[list[str]] = []
    known = [_peaks(before), _peaks(now)]
    for b in now.cells:
        a = before.cell(b.cell)
        peaks = [held.get(b.cell) for held in known]
        times = [c.median_seconds if c is not None and c.timed else None for c in (a, b)]
        made.append(
            [b.cell, *_before_now_and_change(peaks, format_size), *_before_now_and_change(times, format_duration)]
        )
    return made


def _before_now_and_change(values: Sequence[float | None], words: Callable[[float], str]) -> list[str]:
    one, two = values
    part = f"{100 * (two / one - 1):+.1f} %" if one and two is not None else "-"
    return ["-" if v is None else words(v) for v in values] + [part]


def differing_key_rows(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[list[str]]:
    """The keys of two configs that differ, with both values."""
    names = [key for key in {**before, **now} if not key.startswith(IGNORED_KEY_PREFIXES)]
    return [
        [k, to_json_text(before.get(k)), to_json_text(now.get(k))]
        for k in names
        if _comparable_value(before, k) != _comparable_value(now, k)
    ]


def _comparable_value(config: Mapping[str, Any], key: str) -> Any:
    """A task is its file's name and its class, wherever the file lies."""
    return _task(config.get(key)) if key == "task.use" else config.get(key)


def _task(use: Any) -> Any:
    return use.rpartition("/")[2] if isinstance(use, str) else use


def to_json_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def describe_mismatches(before: ComparisonPageData | RunPageData, now: ComparisonPageData | RunPageData) -> list[str]:
    """In what they are not alike, to be read before any difference; memory that was watched in two ways is none."""
    was, found = identifying_facts(before), identifying_facts(now)
    differ = [f"{k} {was[k]} before, {found[k]} now" for k in was if k in found and was[k] != found[k]]
    if isinstance(before, ComparisonPageData) and isinstance(now, ComparisonPageData):
        differ += _describe_different_starts(before, now)
    said = [f"The two are not alike: {'; '.join(differ)}."] if differ else []
    return said + (
        _describe_incomparable_memory(before, now)
        if isinstance(before, ComparisonPageData) and isinstance(now, ComparisonPageData)
        else []
    )


def describe_different_tasks(before: ComparisonPageData | RunPageData, now: ComparisonPageData | RunPageData) -> str:
    """What each trained, where both task and model are others; empty: it may be the same, with a change."""
    both = [identifying_facts(before), identifying_facts(now)]
    kinds = [[told.get(key) for told in both] for key in ("task", "parameters")]
    if any(None in pair or pair[0] == pair[1] for pair in kinds):
        return ""
    return " and ".join(f"{told['task']} with {told['parameters']} parameters" for told in both)


def identifying_facts(told: ComparisonPageData | RunPageData) -> dict[str, str]:
    """What it was, as far as that is known."""
    config = told.config
    if isinstance(told, RunPageData):
        parameters, precision, total = told.report.parameters, config.get("train.precision"), config.get("batch.total")
        known = {"cell": told.report.cell, "ranks": told.report.size}
    else:
        parameters, precision, total = told.parameters, told.comparison.precision, told.comparison.samples
        devices = {a.device if a.on is None else a.on.name for c in told.cells for a in c.memory}
        known = {"ranks": told.comparison.ranks, "device": " and ".join(sorted(devices))}
    told_first = {
        "task": _task(config.get("task.use")),
        "parameters": f"{parameters:,}" if parameters else None,
        "precision": precision,
        "total batch": total,
    }
    return {key: str(value) for key, value in {**told_first, **known}.items() if value}


def _describe_different_starts(before: ComparisonPageData, now: ComparisonPageData) -> list[str]:
    """From what, and on which samples, as the first cell that is in both saw it."""
    marks = [(a.row.marks, c.row.marks) for c in now.cells if (a := before.cell(c.cell)) is not None]
    one, two = next(((a, b) for a, b in marks if a is not None and b is not None), (None, None))
    if one is None or two is None:
        return []
    return ([] if before.parameters != now.parameters else _describe_initial_values(one, two)) + _describe_sample_order(
        one, two
    )


def _describe_initial_values(one: TrainingMarks, two: TrainingMarks) -> list[str]:
    if one.values.keys() != two.values.keys():
        return ["other names of parameters"]
    other = sum(two.values[name] != mark for name, mark in one.values.items())
    return [f"other initial values of {count_of(other, 'parameter')}"] if other else []


def _describe_sample_order(one: TrainingMarks, two: TrainingMarks) -> list[str]:
    if one.total != two.total or one.readers != two.readers:
        return []
    steps = enumerate(zip(one.samples, two.samples, strict=False), 1)
    step = next((i for i, (was, found) in steps if was != found), None)
    return [] if step is None else [f"other samples from step {step} on"]


def without_incomparable_memory(before: ComparisonPageData, now: ComparisonPageData) -> ComparisonPageData:
    """The earlier one, without memory that was watched in another way than now's."""
    return replace(
        before, cells=tuple(replace(c, memory=()) if _is_measured_differently(c, now) else c for c in before.cells)
    )


def _is_measured_differently(cell: CellPageData, now: ComparisonPageData) -> bool:
    later = now.cell(cell.cell)
    if later is None or later.fullest_account is None or cell.fullest_account is None:
        return False
    return later.fullest_account.method != cell.fullest_account.method


def _describe_incomparable_memory(before: ComparisonPageData, now: ComparisonPageData) -> list[str]:
    apart = [cell for cell in before.cells if _is_measured_differently(cell, now)]
    if not apart:
        return []
    was, found = (
        {a.method for c in apart if (seen := told.cell(c.cell)) for a in seen.memory} for told in (before, now)
    )
    cells = "" if len(apart) == len(before.measured_cells) else f" of {', '.join(c.cell for c in apart)}"
    ways = f"{' and '.join(sorted(was))} before, {' and '.join(sorted(found))} now"
    return [f"Memory{cells} is not compared, it was watched in two ways: {ways}."]


def timing_warnings(before: ComparisonPageData, now: ComparisonPageData) -> list[str]:
    """Why times may not be comparable."""
    return environment_warnings(before.machine, now.machine, before.versions, now.versions)


def environment_warnings(
    before: Mapping[str, Any], now: Mapping[str, Any], was: Mapping[str, str], versions: Mapping[str, str]
) -> list[str]:
    """Another machine, and other versions."""
    made: list[str] = []
    if before != now:
        made.append("They were measured on different machines: differences in time say nothing.")
    if names := sorted(k for k in {*was, *versions} if was.get(k) != versions.get(k)):
        told = ", ".join(f"{k} {was.get(k, 'none')} to {versions.get(k, 'none')}" for k in names)
        made.append(f"Other versions: {told}.")
    return made
