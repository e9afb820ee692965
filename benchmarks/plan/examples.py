"""Predicted memory of every example beside measured: `python -m benchmarks.plan.examples [NAME ...]`.

Examples are as small as in `python -m benchmarks.examples`, or with --whole as their configs have them. Compared are
bytes beyond what libraries and Python hold for themselves, with the range of the measured steps. Exit 1: a row is
farther off than 5 % and 512 KiB, or failed: kernels' scratch memory is of that size.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence

from benchmarks.examples import EXAMPLES, ROOT, SMALL
from benchmarks.memory import measure_account
from benchmarks.plan.__main__ import NOT_PLANNED, PUBLIC_LIMIT, Result
from benchmarks.plan.rows import predict_strategy
from unipar.backend import offered_strategies as strategies
from unipar.config import Config, Strategy
from unipar.config.config_source import load_config_file
from unipar.config.settled import SettledConfig
from unipar.errors import UniparError
from unipar.memory.sources.malloc_build import build_meter, preload_environment
from unipar.utils.table import format_table
from unipar.utils.text import format_size

SCRATCH = 2**19
"""Bytes by which any plan on the CPU may be off."""

STRATEGIES = ("single", "native/nothing", "native/parameters")


def measured_examples(names: Sequence[str], patterns: tuple[str, ...], *, whole: bool) -> Iterator[Result]:
    """Yield planned and measured memory of examples in strategies, on two ranks where the strategy has several."""
    environment = preload_environment(build_meter())
    for name in names:
        changes = {"device": "cpu", "parallel.data": 2} | ({} if whole else dict(SMALL.get(name, {})))
        given = load_config_file(ROOT / "configs" / f"{name}.yaml", overrides=changes).config
        for strategy in strategies.expand_strategy_patterns(patterns):
            row = {"model": name, "strategy": str(strategy)}
            try:
                config = strategies.config_in_strategy(given, strategy)
                yield _measured(row, SettledConfig.of(config, strategy, _ranks(config), "cpu"), environment)
            except UniparError as e:
                yield Result(row, error=str(e).splitlines()[0])


def _ranks(config: Config) -> int:
    assert isinstance(config.parallel.ranks, int)
    return config.parallel.ranks


def _measured(row: dict[str, str], settled: SettledConfig, environment: dict[str, str]) -> Result:
    config, strategy = settled.config, Strategy.parse(row["strategy"])
    planned = predict_strategy(config, strategy, settled.ranks).step_peak
    account = measure_account(settled, environment)
    full = max((phase for phase in account.phases if phase.name != "built"), key=lambda phase: phase.peak)
    own = sum(full.held.get(category, 0) for category in NOT_PLANNED)
    return Result(row, planned.phase, planned.peak, min(account.peaks) - own, max(account.peaks) - own)


def main(words: Sequence[str]) -> int:
    """Print the table; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan.examples", description=__doc__)
    parser.add_argument("examples", nargs="*", metavar="NAME", help=", ".join(EXAMPLES))
    parser.add_argument("--strategies", action="append", default=[], metavar="STRATEGY")
    parser.add_argument("--whole", action="store_true")
    given = parser.parse_args(words)
    if unknown := {*given.examples} - {*EXAMPLES}:
        parser.error(f"{', '.join(sorted(unknown))}: the examples are {', '.join(EXAMPLES)}")
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    patterns = tuple(strategy for text in given.strategies for strategy in text.split(",")) or STRATEGIES
    results: list[Result] = []
    for result in measured_examples(given.examples or EXAMPLES, patterns, whole=given.whole):
        results.append(result)
        print(*_shown(result), file=sys.stderr, flush=True)
    print(
        format_table(
            ("example", "strategy", "in", "planned", "measured", "off by"), list(map(_shown, results)), width=160
        )
    )
    return int(any(map(_is_far_off, results)))


def _is_far_off(result: Result) -> bool:
    beyond = max(result.low - result.planned, result.planned - result.high)
    if result.error:
        return not result.error.startswith("plan: ")  # a refusal
    return abs(result.off) > PUBLIC_LIMIT and beyond > SCRATCH


def _shown(result: Result) -> tuple[str, ...]:
    name, strategy = result.row["model"], result.row["strategy"]
    if result.error:
        return name, strategy, result.error
    low, high = format_size(result.low), format_size(result.high)
    spread = low if low == high else f"{low} to {high}"
    return name, strategy, result.phase, format_size(result.planned), spread, f"{result.off:+.2%}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
