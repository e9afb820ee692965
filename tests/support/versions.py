"""The suite against other versions than the pinned ones, each in an environment of its own: `make versions`.

A part of it with the oldest and the newest torch; all of it with newer Pythons.

By hand only, since torch's wheels from the package index bring CUDA: gigabytes for each version.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from typing_extensions import override

from benchmarks.memory import result_row
from tests.support.torch_environment import (
    Environment,
    NoEnvironment,
    environments_folder,
    find_python,
    newer_pythons,
    oldest_and_newest,
    only_user,
    pinned_torch,
    released_versions,
    say,
    torch_requirement,
)
from tests.support.world import ROOT
from unipar.results.comparison import Comparison
from unipar.results.memory_tables import largest_account, largest_peak_bytes
from unipar.utils.table import format_table
from unipar.utils.text import count_of, format_duration

TESTS = (
    "tests/backends",  # what each library is given, and does
    "tests/conformance",  # every strategy against one process, in worlds of one and two
    "tests/engines",  # what each engine holds, to the byte; forward, clip, state
    "tests/memory",  # allocator, profiler, call sites inside torch
    "tests/model",  # meta tensors, recomputation, compilation, optimizers
    "tests/training/test_parts.py",  # several modules and optimizers in one run
    "tests/conversion/test_export.py",  # scripts that call torch and the libraries without unipar
)
"""The part of the suite that is played with another torch: what calls torch or a library, or reads their private names.
Left out is what does not depend on torch: config, pages, command line, processes."""

ALL_TESTS = ("tests",)

HOROVOD_TESTS = (
    "tests/backends/test_horovod.py",
    "tests/conversion/test_export.py::test_the_same_losses[horovod-nothing]",
    "tests/conversion/test_export.py::test_a_script_is_clean[horovod]",
    "tests/conversion/test_export.py::test_refused[horovod-change2-sentence2]",
)
"""Tests that are left out where Horovod is; all others skip what needs it."""

CONFIG = "configs/quickstart.yaml"
"""The config of which `verify` and `compare` are run."""

MEMORY_LIMIT = 0.03
"""Largest difference of a strategy's peak from that under the first version, as a share."""

LONGEST_LIST = 20


@dataclass
class SuiteCounts:
    """Counts of one run of pytest."""

    passed: int = 0
    skipped: int = 0
    failed: list[str] = field(default_factory=list[str])
    reasons: Counter[str] = field(default_factory=Counter[str])
    """Reasons of skips, with how many tests each skipped."""

    @override
    def __str__(self) -> str:
        return f"{self.passed} / {len(self.failed)} / {self.skipped}"


@dataclass
class VersionResult:
    """What came of one version of torch and Python."""

    torch: str
    python: str = ""
    problem: str = ""
    """Reason why the version was not tried, or not to the end."""

    horovod: str = ""
    """Reason why Horovod is left out; empty: it is there."""

    tests: SuiteCounts = field(default_factory=SuiteCounts)
    verified: Mapping[str, str] = field(default_factory=dict[str, str])
    """Outcome of `verify` by strategy, without strategies that were refused or whose library is absent."""

    unnamed: Mapping[str, str] = field(default_factory=dict[str, str])
    """Reason why a strategy's memory does not hold, by strategy that ran; empty where it holds."""

    peaks: Mapping[str, int] = field(default_factory=dict[str, int])
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    """Seconds by stage."""

    codes: dict[str, int] = field(default_factory=dict[str, int])
    """Exit codes by stage."""

    @property
    def label(self) -> str:
        return f"torch {self.torch}, Python {self.python}"

    def good(self) -> bool:
        """Return whether all that was tried went well."""
        agree = bool(self.verified) and set(self.verified.values()) == {"agrees"}
        return not (self.problem or self.tests.failed or any(self.codes.values()) or any(self.unnamed.values())) and (
            agree and bool(self.unnamed) and self.tests.passed > 0
        )


def read_tests(file: Path, code: int) -> SuiteCounts:
    """Return what pytest's report counts; without one, the run itself is a failure."""
    counts = SuiteCounts()
    if not file.exists():
        counts.failed.append(f"pytest itself: exit {code}, without a report")
        return counts
    for case in ElementTree.parse(file).getroot().iter("testcase"):
        skip = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            counts.failed.append(f"{case.get('classname')}::{case.get('name')}")
        elif skip is not None and skip.get("type") == "pytest.skip":
            counts.skipped += 1
            counts.reasons[skip.get("message") or "without a reason"] += 1
        else:  # an expected failure is a statement about a strategy, and holds
            counts.passed += 1
    if code and not counts.failed:
        counts.failed.append(f"pytest itself: exit {code}")
    return counts


def read_verdicts(file: Path) -> dict[str, str]:
    """Return the outcome of each strategy that verify ran."""
    rows: list[dict[str, Any]] = json.loads(file.read_text("utf-8"))["strategies"] if file.exists() else []
    return {row["strategy"]: row["outcome"] for row in rows if row["outcome"] not in ("refused", "absent")}


def read_memory(file: Path) -> tuple[dict[str, str], dict[str, int]]:
    """Return, for each strategy that ran, why its memory does not hold, or ""; and its peak on the largest rank."""
    if not file.exists():
        return {}, {}
    compared = Comparison.read(json.loads(file.read_text("utf-8")))
    problems: dict[str, str] = {}
    peaks: dict[str, int] = {}
    for row in compared.rows:
        if row.outcome == "absent":
            continue
        if row.outcome != "ran" or not row.memory:
            problems[row.strategy] = row.note or compared.unwatched or "no memory was recorded"
            continue
        shown, good = result_row((), list(largest_account(row.memory).phases))
        problems[row.strategy] = "" if good else f"{shown[-1]}: {shown[-2]}"
        peaks[row.strategy] = largest_peak_bytes(row.memory)
    return problems, peaks


def memory_differences(first: Mapping[str, int], other: Mapping[str, int]) -> dict[str, float]:
    """Return by how much peaks differ from the first version's, as shares, in the strategies that ran under both."""
    return {strategy: other[strategy] / first[strategy] - 1 for strategy in first if strategy in other}


def try_version(folder: Path, torch: str, python: str, workers: int, tests: Sequence[str]) -> VersionResult:
    """Play these tests, then verify and compare, under one version of torch and Python."""
    result = VersionResult(torch)
    began = time.monotonic()

    def stage(name: str) -> None:
        nonlocal began
        result.seconds[name] = time.monotonic() - began
        began = time.monotonic()

    try:
        environment = Environment(folder, torch, python)
        result.torch, result.python = environment.make().split()
        result.horovod = environment.install_horovod()
    except (NoEnvironment, OSError, subprocess.CalledProcessError) as e:
        result.problem = str(e)
        return result
    stage("set-up")
    out = environment.results
    say(f"torch {torch}: logs and results are in {out}; tests: {' '.join(tests)}")
    left_out = [f"--deselect={test}" for test in HOROVOD_TESTS if result.horovod]
    words = ("-n", str(workers), "--dist", "loadfile", "--no-loadscope-reorder", f"--junit-xml={out}/tests.xml")
    code, _ = environment.run("tests", ("-m", "pytest", "-q", *words, *left_out, *tests))
    result.tests = read_tests(out / "tests.xml", code)
    stage("tests")
    for command in ("verify", "compare"):
        result.codes[command], _ = environment.run(command, ("-m", "unipar", command, CONFIG, "--out", out / command))
        stage(command)
    result.verified = read_verdicts(out / "verify/verify/verify.json")
    result.unnamed, result.peaks = read_memory(out / "compare/compare/compare.json")
    return result


HEADER = ("torch", "python", "passed / failed / skipped", "verify agrees", "memory holds", "Horovod", "set-up", "time")


def row_of(result: VersionResult) -> tuple[str, ...]:
    """Return a version's row of the table; one that was not tried is a sentence."""
    if result.problem:
        return result.torch, f"not tried: {result.problem}"
    agree = sum(outcome == "agrees" for outcome in result.verified.values())
    holds = sum(not problem for problem in result.unnamed.values())
    return (
        *(result.torch, result.python, str(result.tests)),
        f"{agree} of {len(result.verified)}",
        f"{holds} of {len(result.unnamed)}",
        "left out" if result.horovod else "yes",
        format_duration(result.seconds["set-up"]),
        format_duration(sum(took for stage, took in result.seconds.items() if stage != "set-up")),
    )


def remarks_on(results: Sequence[VersionResult]) -> Iterator[str]:
    """Yield what the table does not say: Horovod's sentence, failures, skips, and how far peaks differ."""
    for one in results:
        if one.horovod:
            yield f"{one.label}: Horovod is left out, with {', '.join(HOROVOD_TESTS)}: {one.horovod}"
        yield from (f"{one.label}: failed: {name}" for name in one.tests.failed[:LONGEST_LIST])
        if (more := len(one.tests.failed) - LONGEST_LIST) > 0:
            yield f"{one.label}: failed: {count_of(more, 'more test')}"
        for what, by_strategy in (("verify", one.verified), ("memory", one.unnamed)):
            bad = {strategy: text for strategy, text in by_strategy.items() if text not in ("", "agrees")}
            yield from (f"{one.label}: {what}: {strategy}: {text}" for strategy, text in bad.items())
        yield from (f"{one.label}: {stage} ended with {code}" for stage, code in one.codes.items() if code)
        yield from (f"{one.label}: skipped {n}: {reason}" for reason, n in one.tests.reasons.most_common())
    tried = [one for one in results if one.peaks]
    for one in tried[1:]:
        apart = memory_differences(tried[0].peaks, one.peaks)
        if apart:
            strategy = max(apart, key=lambda c: abs(apart[c]))
            yield (
                f"allocated at the peak, {one.label} against {tried[0].label}: {count_of(len(apart), 'strategy')}, "
                f"largest difference {100 * apart[strategy]:+.1f} % ({strategy}; "
                f"{100 * MEMORY_LIMIT:.0f} % is allowed)"
            )


def report(results: Sequence[VersionResult]) -> str:
    """Return the table, and the remarks below it."""
    return "\n".join([format_table(HEADER, [row_of(one) for one in results], width=160), *remarks_on(results)])


def exit_code(results: Sequence[VersionResult]) -> int:
    """Return 0 if all went well under each version, and peaks hardly differ; else 1."""
    tried = [one.peaks for one in results if one.peaks]
    apart = [abs(x) for peaks in tried[1:] for x in memory_differences(tried[0], peaks).values()]
    return int(not all(one.good() for one in results) or any(x > MEMORY_LIMIT for x in apart))


def planned(torches: Sequence[str], pythons: Sequence[str]) -> Iterator[tuple[str, str, Sequence[str]]]:
    """Yield each torch, interpreter and part of the suite to be tried; without choices, all."""
    own: str = getattr(sys, "_base_executable", sys.executable)
    pinned = pinned_torch((ROOT / "constraints.txt").read_text("utf-8"))
    if torches:
        yield from ((torch, python, TESTS) for python in pythons or [own] for torch in torches)
    elif pythons:
        yield from ((pinned, python, ALL_TESTS) for python in pythons)
    else:
        yield from ((torch, own, TESTS) for torch in oldest_and_newest(released_versions(), torch_requirement()))
        for name in newer_pythons():
            if python := find_python(name):
                yield pinned, python, ALL_TESTS
            else:
                say(f"Python {name} is left out: no python{name} here; if it is elsewhere: --python FILE")


def main(words: Sequence[str] | None = None) -> int:
    asked = argparse.ArgumentParser(prog="python -m tests.support.versions", description=__doc__)
    asked.add_argument("--torch", action="append", help="a part of the suite with this one; repeat it for more")
    asked.add_argument("--python", action="append", help="this interpreter, with the pinned torch if no --torch")
    asked.add_argument("--workers", type=int, default=2 if (os.cpu_count() or 1) > 1 else 0, help="pytest's processes")
    chosen = asked.parse_args(words)
    folder = environments_folder()
    results: list[VersionResult] = []
    try:
        with only_user(folder):
            for torch, python, tests in planned(chosen.torch or [], chosen.python or []):
                results.append(try_version(folder, torch, python, chosen.workers, tests))
    except NoEnvironment as e:
        say(f"unipar: {e}")
        return 1
    print(report(results))
    return exit_code(results)


if __name__ == "__main__":
    sys.exit(main())
