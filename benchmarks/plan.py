"""Predicted memory beside measured, in each cell that is planned: `python -m benchmarks.plan [10M fp32 2 native/*]`.

Compared are peaks of tensors: what libraries and Python hold for themselves is in no prediction; and the bytes that a
step sends, by collective. Exit 1: a peak is more than 3 % off.
"""

from __future__ import annotations

import sys
from collections import Counter
from statistics import median

from benchmarks.memory import measure_account, select_rows
from unipar.backend import registry
from unipar.backend.prediction.timeline import Prediction
from unipar.errors import UniparError, Unsupported
from unipar.memory.account import MemoryAccount, PhasePeak
from unipar.memory.sources.malloc_build import build_meter, preload_environment
from unipar.planning.peaks import predict_peaks
from unipar.training.fake_run.trace import TracedTask, trace_task
from unipar.utils.table import format_table
from unipar.utils.text import format_size

LIMIT = 0.03
"""Largest difference of a peak, as a share of what was measured."""

NOT_PLANNED = ("library", "runtime", "unattributed")


def tensors_in(phase: PhasePeak) -> int:
    """Return the bytes of tensors at a measured peak."""
    return sum(size for category, size in phase.held.items() if category not in NOT_PLANNED)


def sent_beside(prediction: Prediction, account: MemoryAccount) -> str:
    """Return "exact" if a step sends what is planned, by axis and collective; else by how many bytes it differs."""
    off = Counter({(p.axis, p.collective): p.size for p in prediction.sent})
    off.subtract({(axis, kind): size for axis, by in account.sent_along.items() for kind, size in by.items()})
    differs = [f"{kind} {size:+,}" for (_, kind), size in off.items() if size]
    return ", ".join(differs) or "exact"


def main(words: list[str]) -> int:
    """Measure the selected rows beside their predictions, and print them; return the exit code."""
    environment, traced = preload_environment(build_meter()), dict[tuple[str, ...], TracedTask]()
    rows: list[tuple[str, ...]] = []
    shares: list[float] = []
    for name, settled in select_rows(words):
        size, precision, _, _ = name
        micro = settled.sizes.micro
        if (key := (size, precision, str(micro))) not in traced:
            traced[key] = trace_task(settled.config, micro)
        found = traced[key]
        try:
            backend = registry.find_backend(settled.cell.backend)
            prediction = backend.predict(settled.config, found.timeline, settled.ranks, device="cpu")
            account = measure_account(settled, environment)
        except Unsupported as e:
            print(*name, f"is not planned: {e.reasons[0]}", file=sys.stderr, flush=True)
            continue
        except UniparError as e:
            rows.append((*name, f"failed: {e}"))
            shares.append(1.0)
            continue
        peaks = predict_peaks(found.timeline, prediction, found.activations, micro, settled.sizes.accumulate)
        measured = {phase.name: phase for phase in account.phases}
        planned = max(peaks, key=lambda peak: peak.peak)
        there = tensors_in(measured[planned.phase])
        shares.append(planned.peak / there - 1.0)
        sent = sent_beside(prediction, account)
        row = (*name, planned.phase, format_size(planned.peak), format_size(there), f"{shares[-1]:+.2%}", sent)
        print(*row, file=sys.stderr, flush=True)
        rows.append(row)
    header = ("model", "precision", "ranks", "cell", "in", "planned", "measured", "off by", "sent")
    print(format_table(header, rows, right=(2, 5, 6, 7, 8), width=120))
    off = sorted(abs(share) for share in shares)
    if off:
        print(f"{len(off)} rows: median {median(off):.2%}, most {off[-1]:.2%}, within {LIMIT:.0%}: ", end="")
        print(f"{sum(share <= LIMIT for share in off)}")
    return int(any(share > LIMIT for share in off))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
