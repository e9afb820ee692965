"""Two comparisons laid over one another: what changed from the first to the second."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from unipar.report.seen import Told
from unipar.report.table import duration, size

SILENT = ("out", "compare.")
"""Keys that say where a run lies, and not what it is."""


def sentence(before: Told, now: Told) -> str:
    """What became of each cell that is in both, in one line: the one whose memory or time changed most."""
    pairs = [(a, b) for b in now.cells if (a := before.cell(b.cell)) is not None]
    was, held = _peaks(before), _peaks(now)
    said: list[tuple[float, str]] = []
    for cell in held:
        if one := was.get(cell):
            part = held[cell] / one - 1
            said.append((abs(part), f"{cell} holds {_percent(part)} memory ({size(one)} to {size(held[cell])})"))
    times = [
        (abs(part := b.middle / a.middle - 1), f"{b.cell} takes {_percent(part)} time a step")
        for a, b in pairs
        if a.timed and b.timed
    ]
    words = [max(found)[1] for found in (said, times) if found]
    return f"Since {before.folder}: " + (", ".join(words) if words else "no cell is in both") + "."


def _peaks(told: Told) -> dict[str, int]:
    """By cell; of one that failed not all is known."""
    return {cell.cell: cell.peak for cell in told.measured}


def _percent(part: float) -> str:
    return "as much" if abs(part) < 0.0005 else f"{abs(part) * 100:.1f} % {'less' if part < 0 else 'more'}"


def rows(before: Told, now: Told) -> list[list[str]]:
    """By cell: memory before and now, time before and now, each with its difference."""
    made: list[list[str]] = []
    known = [_peaks(before), _peaks(now)]
    for b in now.cells:
        a = before.cell(b.cell)
        peaks = [held.get(b.cell) for held in known]
        times = [c.middle if c is not None and c.timed else None for c in (a, b)]
        made.append([b.cell, *_both(peaks, size), *_both(times, duration)])
    return made


def _both(values: Sequence[float | None], words: Callable[[float], str]) -> list[str]:
    one, two = values
    part = f"{100 * (two / one - 1):+.1f} %" if one and two is not None else "-"
    return ["-" if v is None else words(v) for v in values] + [part]


def keys(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[list[str]]:
    """The keys of two configs that differ, with both values."""
    names = [key for key in {**before, **now} if not key.startswith(SILENT)]
    return [[k, said(before.get(k)), said(now.get(k))] for k in names if _meant(before, k) != _meant(now, k)]


def _meant(config: Mapping[str, Any], key: str) -> Any:
    """A task is its file's name and its class, wherever the file lies."""
    value = config.get(key)
    return value.rpartition("/")[2] if key == "task.use" and isinstance(value, str) else value


def said(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def warnings(before: Told, now: Told) -> list[str]:
    """Why the two may not be comparable."""
    return moved(before.machine, now.machine, before.versions, now.versions)


def moved(
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
