"""Every strategy and precision on the emulated device as a table: `make emulated`."""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from pathlib import Path

from tests.support.forks import Forks
from tests.support.softcuda.processes import EmulatedDevice
from tests.support.softcuda.strategies import (
    FEATURES,
    TRAININGS,
    EmulatedTraining,
    judge,
    largest_difference,
    losses_of_one_process,
    waits_of_a_step,
)
from unipar.utils.table import format_table

HEAD = ("strategy", "precision", "from one process", "waits a step", "time", "")


def row_of(device: EmulatedDevice, training: EmulatedTraining, precision: str, wanted: list[float]) -> list[str]:
    """Return a row of the table; its last word says what is wrong, or ok."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        run = training.run(device, precision, Path(folder))
    said = judge(training, precision, run, wanted) or "ok"
    apart = largest_difference(run.result, wanted) if run.result else math.nan
    waits = waits_of_a_step(training, run, lines=True)
    shown = ", ".join(f"{count:g} {what}" for what, count in sorted(waits.items())) or "none"
    return [training.name, precision, f"{apart:.1e}", shown, f"{time.monotonic() - start:.0f} s", said]


def main() -> int:
    """Play what is asked for, print a table, and return 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description="every strategy and precision on the emulated device")
    parser.add_argument("only", nargs="*", help="words that a row's name must have one of")
    asked = parser.parse_args()
    played = [t for t in (*TRAININGS, *FEATURES) if not asked.only or any(word in t.name for word in asked.only)]
    rows: list[list[str]] = []
    with tempfile.TemporaryDirectory() as folder, EmulatedDevice(Path(folder)) as device, Forks() as forks:
        wanted = losses_of_one_process(forks, Path(folder))
        for training in played:
            for precision in training.precisions:
                rows.append(row_of(device, training, precision, wanted))
                print(*rows[-1], sep="  ", flush=True)
    print("emulated: no GPU has run any of this")
    print(format_table(HEAD, rows, width=200))
    return int(any(row[-1] != "ok" for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
