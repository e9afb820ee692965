"""Every strategy and precision on the emulated device as a table: `make emulated`."""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from tests.support.forks import Forks
from tests.support.softcuda.processes import EmulatedDevice
from tests.support.softcuda.trainings.memory_accounts import AccountCheck, check_accounts
from tests.support.softcuda.trainings.strategies import (
    FEATURES,
    TRAININGS,
    EmulatedTraining,
    judge,
    largest_difference,
    losses_of_one_process,
    waits_of_a_step,
)
from unipar.utils.table import format_table

HEAD = ("strategy", "precision", "from one process", "waits a step", "memory's account", "time", "")
PRECISIONS = ("fp32", "bf16-mixed", "fp16", "bf16-master")


def row_of(
    device: EmulatedDevice,
    training: EmulatedTraining,
    precision: str,
    wanted: list[float],
    accounts: Mapping[str, AccountCheck],
) -> list[str]:
    """Return a row of the table; its last word says what is wrong, or ok."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        run = training.run(device, precision, Path(folder))
    account = None if training.more else accounts.get(training.strategy)
    wrong = judge(training, precision, run, wanted) or ("" if account is None or account.is_good else "account")
    apart = largest_difference(run.result, wanted) if run.result else math.nan
    waits = waits_of_a_step(training, run, lines=True)
    shown = ", ".join(f"{count:g} {what}" for what, count in sorted(waits.items())) or "none"
    seconds = f"{time.monotonic() - start:.0f} s"
    return [training.name, precision, f"{apart:.1e}", shown, str(account or ""), seconds, wrong or "ok"]


def main() -> int:
    """Play what is asked for, print a table, and return 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description="every strategy and precision on the emulated device")
    parser.add_argument("only", nargs="*", help="words that a row's name must have one of")
    asked = parser.parse_args()
    played = [t for t in (*TRAININGS, *FEATURES) if not asked.only or any(word in t.name for word in asked.only)]
    rows: list[list[str]] = []
    with tempfile.TemporaryDirectory() as folder, EmulatedDevice(Path(folder)) as device, Forks() as forks:
        wanted = losses_of_one_process(forks, Path(folder))
        for precision in PRECISIONS:
            plain = [training for training in played if not training.more]
            accounts = check_accounts(device, precision, plain, 4) | check_accounts(device, precision, plain)
            for training in (training for training in played if precision in training.precisions):
                with tempfile.TemporaryDirectory() as own:
                    losses = training.losses_on_cpu(forks, Path(own)) if training.more else wanted
                rows.append(row_of(device, training, precision, losses, accounts))
                print(*rows[-1], sep="  ", flush=True)
    print("emulated: no GPU has run any of this")
    print(format_table(HEAD, rows, width=200))
    return int(any(row[-1] != "ok" for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
