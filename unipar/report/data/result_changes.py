"""Differences between two comparisons, or between two runs: what changed from the earlier to the later one."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from unipar.report.data.comparison_data import ComparisonPageData, StrategyPageData
from unipar.report.data.run_data import RunPageData
from unipar.results.same_training import TrainingMarks
from unipar.utils.text import count_of, format_duration, format_size

IGNORED_KEY_PREFIXES = ("out", "compare.")
"""Prefixes of config keys that are not compared: where a run's files lie, and which strategies were compared."""


def describe_largest_change(before: ComparisonPageData, now: ComparisonPageData) -> str:
    """Return one sentence: the strategy whose memory changed most, and the strategy whose step time changed most."""
    pairs = [(a, b) for b in now.strategies if (a := before.strategy(b.strategy)) is not None]
    old_peaks, peaks = _peaks(before), _peaks(now)
    sizes: list[tuple[float, str]] = []
    for strategy, peak in peaks.items():
        if old_peak := old_peaks.get(strategy):
            part = peak / old_peak - 1
            sizes.append(
                (
                    abs(part),
                    f"{strategy} holds {_percent(part)} memory ({format_size(old_peak)} to {format_size(peak)})",
                )
            )
    times = [
        (abs(part := b.median_seconds / a.median_seconds - 1), f"{b.strategy} takes {_percent(part)} time a step")
        for a, b in pairs
        if a.timed and b.timed
    ]
    words = [max(changes)[1] for changes in (sizes, times) if changes]
    return f"Since {before.folder}: " + (", ".join(words) if words else "no strategy is in both") + "."


def _peaks(page: ComparisonPageData) -> dict[str, int]:
    """Return peak bytes by strategy; strategies that failed are left out, because their memory is not fully known."""
    return {strategy.strategy: strategy.peak for strategy in page.measured_strategies}


def _percent(part: float) -> str:
    return "the same" if abs(part) < 0.0005 else f"{abs(part) * 100:.1f} % {'less' if part < 0 else 'more'}"


def change_rows(before: ComparisonPageData, now: ComparisonPageData) -> list[list[str]]:
    """Return one row per strategy: memory before and now, step time before and now, each with its change."""
    rows: list[list[str]] = []
    known = [_peaks(before), _peaks(now)]
    for b in now.strategies:
        a = before.strategy(b.strategy)
        peaks = [by_strategy.get(b.strategy) for by_strategy in known]
        times = [c.median_seconds if c is not None and c.timed else None for c in (a, b)]
        rows.append(
            [b.strategy, *_before_now_and_change(peaks, format_size), *_before_now_and_change(times, format_duration)]
        )
    return rows


def _before_now_and_change(values: Sequence[float | None], words: Callable[[float], str]) -> list[str]:
    one, two = values
    part = f"{100 * (two / one - 1):+.1f} %" if one and two is not None else "-"
    return ["-" if v is None else words(v) for v in values] + [part]


def differing_key_rows(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[list[str]]:
    """Return one row per key whose value differs between the two configs: the key and both values."""
    names = [key for key in {**before, **now} if not key.startswith(IGNORED_KEY_PREFIXES)]
    return [
        [k, to_json_text(before.get(k)), to_json_text(now.get(k))]
        for k in names
        if _comparable_value(before, k) != _comparable_value(now, k)
    ]


def _comparable_value(config: Mapping[str, Any], key: str) -> Any:
    """Return the value of a key; of the task's path only file name and class, because its folder does not matter."""
    return _task(config.get(key)) if key == "task.use" else config.get(key)


def _task(use: Any) -> Any:
    return use.rpartition("/")[2] if isinstance(use, str) else use


def to_json_text(value: Any) -> str:
    """Return a config value as JSON, with non-ASCII characters as they are."""
    return json.dumps(value, ensure_ascii=False)


def describe_mismatches(before: ComparisonPageData | RunPageData, now: ComparisonPageData | RunPageData) -> list[str]:
    """Return sentences on facts that must be the same for a fair comparison, and are not; [] if all are the same."""
    old_facts, facts = identifying_facts(before), identifying_facts(now)
    differ = [f"{k} {v} before, {facts[k]} now" for k, v in old_facts.items() if k in facts and v != facts[k]]
    if isinstance(before, ComparisonPageData) and isinstance(now, ComparisonPageData):
        differ += _describe_different_starts(before, now)
    sentences = [f"The two differ: {'; '.join(differ)}."] if differ else []
    return sentences + (
        _describe_incomparable_memory(before, now)
        if isinstance(before, ComparisonPageData) and isinstance(now, ComparisonPageData)
        else []
    )


def describe_different_tasks(before: ComparisonPageData | RunPageData, now: ComparisonPageData | RunPageData) -> str:
    """Return what each of the two trained, if both task and parameter count differ; else ""."""
    both = [identifying_facts(before), identifying_facts(now)]
    kinds = [[facts.get(key) for facts in both] for key in ("task", "parameters")]
    if any(None in pair or pair[0] == pair[1] for pair in kinds):
        return ""
    return " and ".join(f"{facts['task']} with {facts['parameters']} parameters" for facts in both)


def identifying_facts(page: ComparisonPageData | RunPageData) -> dict[str, str]:
    """Return task, parameters, precision, total batch, ranks, strategy and device as text, as far as known."""
    config = page.config
    if isinstance(page, RunPageData):
        parameters, precision, total = page.report.parameters, config.get("train.precision"), config.get("batch.total")
        known = {"strategy": page.report.strategy, "ranks": page.report.size}
    else:
        parameters, precision, total = page.parameters, page.comparison.precision, page.comparison.samples
        devices = {a.device if a.on is None else a.on.name for c in page.strategies for a in c.memory}
        known = {"ranks": page.comparison.ranks, "device": " and ".join(sorted(devices))}
    shown_first = {
        "task": _task(config.get("task.use")),
        "parameters": f"{parameters:,}" if parameters else None,
        "precision": precision,
        "total batch": total,
    }
    return {key: str(value) for key, value in {**shown_first, **known}.items() if value}


def _describe_different_starts(before: ComparisonPageData, now: ComparisonPageData) -> list[str]:
    """Return differences in initial values and samples, as recorded by the first strategy of both comparisons."""
    marks = [(a.row.marks, c.row.marks) for c in now.strategies if (a := before.strategy(c.strategy)) is not None]
    one, two = next(((a, b) for a, b in marks if a is not None and b is not None), (None, None))
    if one is None or two is None:
        return []
    return ([] if before.parameters != now.parameters else _describe_initial_values(one, two)) + _describe_sample_order(
        one, two
    )


def _describe_initial_values(one: TrainingMarks, two: TrainingMarks) -> list[str]:
    if one.values.keys() != two.values.keys():
        return ["different parameter names"]
    other = sum(two.values[name] != mark for name, mark in one.values.items())
    return [f"different initial values of {count_of(other, 'parameter')}"] if other else []


def _describe_sample_order(one: TrainingMarks, two: TrainingMarks) -> list[str]:
    if one.total != two.total or one.readers != two.readers:
        return []
    steps = enumerate(zip(one.samples, two.samples, strict=False), 1)
    step = next((i for i, (old, new) in steps if old != new), None)
    return [] if step is None else [f"different samples from step {step} on"]


def without_incomparable_memory(before: ComparisonPageData, now: ComparisonPageData) -> ComparisonPageData:
    """Return the earlier comparison without the memory that was measured by another method than in the later one."""
    return replace(
        before,
        strategies=tuple(replace(c, memory=()) if _is_measured_differently(c, now) else c for c in before.strategies),
    )


def _is_measured_differently(strategy: StrategyPageData, now: ComparisonPageData) -> bool:
    later = now.strategy(strategy.strategy)
    if later is None or later.fullest_account is None or strategy.fullest_account is None:
        return False
    return later.fullest_account.method != strategy.fullest_account.method


def _describe_incomparable_memory(before: ComparisonPageData, now: ComparisonPageData) -> list[str]:
    other = [strategy for strategy in before.strategies if _is_measured_differently(strategy, now)]
    if not other:
        return []
    old_methods, methods = (
        {a.method for c in other if (row := page.strategy(c.strategy)) for a in row.memory} for page in (before, now)
    )
    strategies = "" if len(other) == len(before.measured_strategies) else f" of {', '.join(c.strategy for c in other)}"
    ways = f"{' and '.join(sorted(old_methods))} before, {' and '.join(sorted(methods))} now"
    return [f"Memory{strategies} is not compared, it was measured in two ways: {ways}."]


def timing_warnings(before: ComparisonPageData, now: ComparisonPageData) -> list[str]:
    """Return reasons why the step times of the two comparisons may not be comparable."""
    return environment_warnings(before.machine, now.machine, before.versions, now.versions)


def environment_warnings(
    before: Mapping[str, Any], now: Mapping[str, Any], was: Mapping[str, str], versions: Mapping[str, str]
) -> list[str]:
    """Return warnings if the machines, or the versions of libraries, differ."""
    warnings: list[str] = []
    if before != now:
        warnings.append("They were measured on different machines: times cannot be compared.")
    if names := sorted(k for k in {*was, *versions} if was.get(k) != versions.get(k)):
        changes = ", ".join(f"{k} {was.get(k, 'none')} to {versions.get(k, 'none')}" for k in names)
        warnings.append(f"Different versions: {changes}.")
    return warnings
