"""Predicted memory beside measured, in each cell that is planned: `python -m benchmarks.plan [10M fp32 2 native/*]`.

Compared are peaks of tensors: what libraries and Python hold for themselves is in no prediction. Exit 1: a row is more
than 3 % off.
"""

from __future__ import annotations

import sys
from collections import Counter
from statistics import median

from benchmarks.memory import measure_account, select_rows
from unipar.errors import UniparError, Unsupported
from unipar.memory.account import MemoryAccount, PhasePeak
from unipar.memory.sources.malloc_build import build_meter, preload_environment
from unipar.training.fake_run.parts import PredictedStep, TaskTraces
from unipar.utils.table import format_table
from unipar.utils.text import format_size

LIMIT = 0.03
"""Largest difference of a peak, as a share of what was measured."""

NOT_PLANNED = ("library", "runtime", "unattributed")


def tensors_in(phase: PhasePeak) -> int:
    """Return the bytes of tensors at a measured peak."""
    return sum(size for category, size in phase.held.items() if category not in NOT_PLANNED)


def compare_sent(step: PredictedStep, account: MemoryAccount) -> str:
    """Return in words whether a step sends what was planned, along each axis by each collective."""
    planned = Counter[tuple[str, str]]()
    for one in step.sent:
        planned[one.axis, one.collective] += one.size
    sent = Counter({(axis, kind): n for axis, kinds in account.sent_along.items() for kind, n in kinds.items()})
    if not step.sent:
        return "not planned" if sent else "nothing"
    off = [f"{axis} {kind} {planned[axis, kind] - sent[axis, kind]:+,}" for axis, kind in planned | sent]
    return "equal" if planned == sent else ", ".join(word for word in off if not word.endswith(" +0"))


def main(words: list[str]) -> int:
    """Measure the selected rows beside their predictions, and print them; return the exit code."""
    environment, traced = preload_environment(build_meter()), dict[tuple[str, ...], TaskTraces]()
    rows: list[tuple[str, ...]] = []
    shares: list[float] = []
    for name, settled in select_rows(words):
        size, precision, _, _ = name
        micro = settled.sizes.micro
        if (key := (size, precision, str(micro))) not in traced:
            traced[key] = TaskTraces(settled.config, micro)
        try:
            step = traced[key].predict(settled.config, settled.ranks, settled.sizes, device="cpu")
            account = measure_account(settled, environment)
        except Unsupported as e:
            print(*name, f"is not planned: {e.reasons[0]}", file=sys.stderr, flush=True)
            continue
        except UniparError as e:
            rows.append((*name, f"failed: {e}"))
            shares.append(1.0)
            continue
        planned = max(step.phases, key=lambda peak: peak.peak)
        there = next(tensors_in(phase) for phase in account.phases if phase.name == planned.phase)
        shares.append(planned.peak / there - 1.0)
        row = (
            *name,
            planned.phase,
            format_size(planned.peak),
            format_size(there),
            f"{shares[-1]:+.2%}",
            compare_sent(step, account),
        )
        print(*row, file=sys.stderr, flush=True)
        rows.append(row)
    header = ("model", "precision", "ranks", "cell", "in", "planned", "measured", "off by", "sent")
    print(format_table(header, rows, right=(2, 5, 6, 7), width=120))
    off = sorted(abs(share) for share in shares)
    if off:
        print(f"{len(off)} rows: median {median(off):.2%}, most {off[-1]:.2%}, within {LIMIT:.0%}: ", end="")
        print(f"{sum(share <= LIMIT for share in off)}")
    return int(any(share > LIMIT for share in off))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
