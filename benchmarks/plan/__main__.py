"""Predicted memory and bytes sent beside measured.

    python -m benchmarks.plan                          a covering set of rows: each pair of values at least once
    python -m benchmarks.plan --whole                  all rows; what an earlier go has measured is kept
    python -m benchmarks.plan --public                 models of transformers
    python -m benchmarks.plan model=10M ranks=1,2 'strategy=native/*'    all rows with these values
    python -m benchmarks.plan compile=blocks,model model=10M micro=8 ...   under torch.compile

Compared are bytes beyond what libraries and Python hold for themselves, with the range of the measured steps. What was
measured is kept in runs/plan-rows.jsonl, and planned anew; --again measures anew. Exit 1: a row is farther off than its
limit, or the bytes sent differ.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.memory import measure_account
from benchmarks.plan.rows import OF_OURS, OF_PUBLIC, Row, config_of, covering_rows, predict_strategy, rows_of
from unipar.backend import offered_strategies as strategies
from unipar.config import Strategy
from unipar.config.settled import SettledConfig
from unipar.errors import UniparError, Unsupported
from unipar.memory.sources.malloc_build import build_meter, preload_environment
from unipar.planning.peaks import PredictedPeak
from unipar.utils.table import format_table
from unipar.utils.text import format_duration, format_size

LIMITS = {"10M": 0.03, "50M": 0.03}
"""Largest distance of a peak from the range of the measured steps, as a share of it."""

PUBLIC_LIMIT = 0.05
ROWS = 120
"""Number of rows of the covering set, at least."""

NOT_PLANNED = ("library", "runtime")
STORE = Path("runs/plan-rows.jsonl")


@dataclass(frozen=True)
class Result:
    """A row, planned and measured."""

    row: dict[str, Any]
    phase: str = ""
    planned: int = 0
    low: int = 0
    """Lowest peak of a measured step, without what libraries and Python hold for themselves."""

    high: int = 0
    sent: dict[str, int] | None = None
    """Planned bytes sent by axis and collective, where it differs from the measured one."""

    measured_sent: dict[str, int] | None = None
    held: dict[str, int] | None = None
    measured_held: dict[str, int] | None = None
    error: str = ""

    @property
    def off(self) -> float:
        """Distance of the planned peak from the range of the measured ones, as a share of it."""
        if self.error:
            return 1.0
        if self.low <= self.planned <= self.high:
            return 0.0
        nearest = self.low if self.planned < self.low else self.high
        return self.planned / nearest - 1.0


def plan_row(row: Row) -> tuple[PredictedPeak, Mapping[str, int]]:
    """Return the fullest phase of a row as planned, and its bytes sent; raise Unsupported if it is not planned."""
    predicted = predict_strategy(config_of(row), Strategy.parse(row.strategy), row.ranks)
    sent = {f"{p.axis} {p.collective}": 0 for p in predicted.sent}
    for p in predicted.sent:
        sent[f"{p.axis} {p.collective}"] += p.size
    return predicted.step_peak, sent


def compare(row: Row, environment: dict[str, str]) -> Result:
    """Return a row, planned and measured."""
    config, strategy = config_of(row), Strategy.parse(row.strategy)
    planned_anew(Result(asdict(row)))  # what is not planned is not measured either
    settled = SettledConfig.of(config, strategy, row.ranks, "cpu")
    account = measure_account(settled, environment, library_traffic=True)
    full = max((phase for phase in account.phases if phase.name != "built"), key=lambda phase: phase.peak)
    own = sum(full.held.get(category, 0) for category in NOT_PLANNED)
    measured = Result(
        asdict(row),
        low=min(account.peaks) - own,
        high=max(account.peaks) - own,
        measured_sent={f"{axis} {kind}": size for axis, of in account.sent_along.items() for kind, size in of.items()},
        measured_held={k: v for k, v in full.held.items() if v} | {f"in {full.name}": full.peak},
    )
    return planned_anew(measured)


def planned_anew(result: Result) -> Result:
    """Return a measured row beside today's plan; raise Unsupported if there is none."""
    planned, sent = plan_row(Row(**result.row))
    held = {k: v for k, v in planned.held.items() if v}
    return replace(result, phase=planned.phase, planned=planned.peak, sent=dict(sent), held=held)


def select(options: argparse.Namespace, measured: Collection[Row]) -> Iterator[Row]:
    """Yield the rows that are asked for; in a covering set, rather those that are measured already."""
    given: dict[str, list[str]] = {}
    for word in options.values:
        key, _, values = word.partition("=")
        given[key] = values.split(",")
    settings = {**(OF_PUBLIC if options.public else OF_OURS), "compile": tuple(given.get("compile", ["none"]))}
    if unknown := given.keys() - settings.keys() - {"strategy"}:
        raise SystemExit(f"{', '.join(sorted(unknown))}: rows differ in {', '.join(settings)} and strategy")
    chosen = {key: [v for v in of if str(v) in given.get(key, map(str, of))] for key, of in settings.items()}
    patterns = tuple(given.get("strategy", ()))
    rows = rows_of(
        chosen, [str(strategy) for strategy in strategies.expand_strategy_patterns(patterns)] if patterns else ()
    )
    yield from rows if given or options.whole or options.public else covering_rows(rows, ROWS, measured)


def main(arguments: Sequence[str]) -> int:
    """Plan and measure the selected rows, and print them; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan", description=__doc__, add_help=True)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("values", nargs="*")
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--public", action="store_true")
    parser.add_argument("--again", action="store_true")
    options = parser.parse_args(arguments)
    environment, began = preload_environment(build_meter()), time.monotonic()
    STORE.parent.mkdir(exist_ok=True)
    lines = STORE.read_text("utf-8").splitlines() if STORE.exists() and not options.again else []
    kept = {Row(**each["row"]): Result(**each) for each in map(json.loads, lines)}
    results: list[Result] = []
    rows = list(select(options, kept))
    for number, row in enumerate(rows, 1):
        earlier = kept.get(row)
        if earlier is not None:
            result = planned_anew(earlier)
        else:
            try:
                result = compare(row, environment)
            except Unsupported as e:
                result = Result(asdict(row), error=f"is not planned: {e.reasons[0]}")
            except UniparError as e:
                result = Result(asdict(row), error=f"failed: {str(e).splitlines()[0]}")
            else:
                with STORE.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(result)) + "\n")
        results.append(result)
        took = format_duration(time.monotonic() - began)
        print(f"{number} of {len(rows)}, {took}:", *filter(None, show(result)), file=sys.stderr, flush=True)
    return report(results)


def show(result: Result) -> tuple[str, ...]:
    """Return a row of the table."""
    words = Row(**result.row).words
    if result.error:
        return (*words, result.error)
    spread = format_size(result.low)
    if format_size(result.high) != spread:
        spread = f"{format_size(result.low)} to {format_size(result.high)}"
    sent = "" if result.sent == result.measured_sent else f"{result.sent} for {result.measured_sent}"
    return (*words, result.phase, format_size(result.planned), spread, f"{result.off:+.2%}", sent)


def report(results: Sequence[Result]) -> int:
    """Print the table and the distribution; return the exit code."""
    header = ("model", "precision", "ranks", "micro", "", "strategy", "in", "planned", "measured", "off by", "sent")
    print(format_table(header, [show(result) for result in results], right=(2, 3, 7, 8, 9), width=160))
    planned = [result for result in results if not result.error]
    offs = sorted(abs(result.off) for result in planned)
    if not offs:
        return 1
    print(f"\n{len(offs)} rows: median {median(offs):.2%}, most {offs[-1]:.2%}")
    for low, high in ((0.0, 0.001), (0.001, 0.01), (0.01, 0.03), (0.03, 0.05), (0.05, 9.0)):
        count = sum(low <= off < high or (low == off == 0.0) for off in offs)
        print(f"  {low:>5.1%} to {min(high, 1.0):>6.1%}  {count:>4}  {'#' * round(60 * count / len(offs))}")
    same = sum(result.sent == result.measured_sent for result in planned)
    print(f"equal bytes sent: {same} of {len(planned)}; not planned or failed: {len(results) - len(planned)}")
    good = all(abs(r.off) <= LIMITS.get(r.row["model"], PUBLIC_LIMIT) for r in planned)
    return int(not good or same < len(planned) or len(planned) < len(results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
