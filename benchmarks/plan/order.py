"""Order of strategies by predicted seconds of a step, beside the measured order.

    python -m benchmarks.plan.order                      every strategy on 2 ranks, a character GPT of 10 million
    python -m benchmarks.plan.order 'native/*' horovod   some

The machine is measured first (`unipar plan --calibrate`), then the strategies train in turns as `unipar compare` has
them. A pair of strategies counts if all medians of one's rounds are below all of the other's; other pairs are within
noise. The rank correlation is the share of counted pairs in the predicted order less that of the others (Kendall's).
Needs a quiet machine. Exit 1: it is below 0.8.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import combinations
from statistics import median

import unipar
from benchmarks.memory import SIZES
from benchmarks.plan.rows import CONTEXT, ROOT
from unipar.calibration.calibrate import calibrate
from unipar.utils.table import format_table

RANKS = 2
LEAST = 0.8
"""Rank correlation that is asked for, at least."""


def measure(config: Mapping[str, object], strategies: Sequence[str]) -> dict[str, list[float]]:
    """Return the median step of each round of each strategy, in seconds."""
    rows = unipar.compare(config, strategies=strategies, world=RANKS, overwrite=True).rows
    return {row.strategy: [median(seconds) for seconds in row.seconds] for row in rows if row.outcome == "ran"}


def correlation(measured: Mapping[str, Sequence[float]], predicted: Mapping[str, float]) -> tuple[float, int, int]:
    """Return the rank correlation, the number of pairs that count, and that of all pairs."""
    right = wrong = 0
    pairs = list(combinations(predicted, 2))
    for one, other in pairs:
        for low, high in ((one, other), (other, one)):
            if max(measured[low]) < min(measured[high]):
                right += predicted[low] < predicted[high]
                wrong += predicted[low] >= predicted[high]
    return (right - wrong) / max(1, right + wrong), right + wrong, len(pairs)


def main(arguments: Sequence[str]) -> int:
    """Measure the machine and the strategies, print both orders and their correlation; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan.order", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("strategies", nargs="*", default=["*"])
    options = parser.parse_args(arguments)
    machine = calibrate(lambda text: print(text, file=sys.stderr))
    with tempfile.TemporaryDirectory(prefix="unipar-order-") as out:
        config = {
            "task": {"use": f"{ROOT}/examples/char_gpt.py:CharGPT", "args": {**SIZES["10M"], "context": CONTEXT}},
            "device": "cpu",
            "out": out,
            "parallel": {"data": RANKS},
            "batch": {"total": 8},
            "train": {"steps": 24, "optimizer": {"lr": 3e-4}},
            "compare": {"repeat": 5},
        }
        measured = measure(config, options.strategies)
        planned = unipar.plan(config, strategies=list(measured), worlds=[RANKS], machine=machine).rows
    predicted = {
        row.strategy: row.speed.seconds for row in planned if row.speed is not None and row.strategy in measured
    }
    header = ("strategy", "measured ms", "rounds", "predicted ms")
    table = [
        (
            strategy,
            f"{1e3 * median(of):.0f}",
            f"{1e3 * min(of):.0f} to {1e3 * max(of):.0f}",
            f"{1e3 * predicted[strategy]:.0f}",
        )
        for strategy, of in sorted(measured.items(), key=lambda row: median(row[1]))
        if strategy in predicted
    ]
    print(format_table(header, table, right=(1, 2, 3), width=100))
    found, counted, pairs = correlation(measured, predicted)
    print(f"rank correlation {found:.2f} over {counted} of {pairs} pairs; the others are within noise")
    return int(found < LEAST)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
