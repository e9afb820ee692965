"""Cost of observing in a step: `python -m benchmarks.observed.overhead`.

The same script runs observed and alone in turns, each time in a process of its own; a tiny model shows the cost of the
hooks, in microseconds, and the quickstart's model its share of a step.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from benchmarks.observed.categories import environment
from benchmarks.timing import interval
from unipar.utils.table import format_table

ROOT: Final = Path(__file__).parents[2]
LOOP: Final = Path(__file__).with_name("timed_loop.py")
ROUNDS: Final = 8
LIMIT: Final = 0.03


def median_step(size: str, *, observed: bool) -> float:
    """Return the median time of a step of the loop, as the loop measures it."""
    with tempfile.TemporaryDirectory() as folder:
        times = Path(folder) / "times.json"
        command = [sys.executable, str(LOOP), size, str(times)]
        if observed:
            command = [sys.executable, "-m", "unipar", "observe", "--out", f"{folder}/out", "--", *command]
        subprocess.run(
            command, cwd=ROOT, env=environment(), check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        return statistics.median(json.loads(times.read_text("utf-8")))


def main() -> int:
    """Print the table; return 1 if observing takes more of the quickstart's step than it may."""
    rows: list[tuple[str, ...]] = []
    share = 0.0
    for size in ("tiny", "quickstart"):
        pairs = [(median_step(size, observed=False), median_step(size, observed=True)) for _ in range(ROUNDS)]
        gap = interval([(theirs - alone) * 1e6 for alone, theirs in pairs])
        ratio = interval([theirs / alone - 1 for alone, theirs in pairs])
        share = ratio.middle
        rows.append(
            (
                size,
                f"{statistics.median(alone for alone, _ in pairs) * 1e3:.3f}",
                f"{gap.middle:+.0f} [{gap.low:+.0f}..{gap.high:+.0f}]",
                f"{ratio.middle:+.1%} [{ratio.low:+.1%}..{ratio.high:+.1%}]",
            )
        )
    print(format_table(("model", "ms a step alone", "observed, us more", "share"), rows, right=(1, 2, 3)))
    return int(share > LIMIT)


if __name__ == "__main__":
    raise SystemExit(main())
