"""The account of an observed script beside that of `unipar compare`: `python -m benchmarks.observed.categories`.

The script trains the model of the quickstart by the same library with the same settings, data and environment
(`METER_ENVIRONMENT`: MKL keeps no buffers; torch records no calls of collectives, of which a comparison makes more, in
a table that doubles). Each category at the peak of forward and of backward is compared, but for `runtime`, which is
shown: the dataset and what Python keeps.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import yaml

from unipar.backend import Category
from unipar.memory.account import MemoryAccount, PhaseName, read_account
from unipar.memory.sources.malloc_build import METER_ENVIRONMENT
from unipar.results.memory_tables import format_mib
from unipar.utils.files import path_with_scripts
from unipar.utils.table import format_table

ROOT: Final = Path(__file__).parents[2]
SCRIPT: Final = Path(__file__).with_name("script.py")
WAYS: Final = {
    "ddp": "native-nothing",
    "zero-redundancy": "native-optimizer",
    "fsdp2-kept": "native-gradients",
    "fsdp2": "native-parameters",
    "zero1": "deepspeed-optimizer",
    "zero2": "deepspeed-gradients",
    "zero3": "deepspeed-parameters",
    "horovod": "horovod-nothing",
    "accelerate": "accelerate-nothing",
}
"""Ways of the script, each with the folder of its strategy in a comparison."""

CONFIG: Final[dict[str, Any]] = {
    "task": {
        "use": f"{ROOT}/examples/char_gpt.py:CharGPT",
        "args": {"layers": 5, "width": 384, "heads": 6, "context": 64},
    },
    "device": "cpu",
    "parallel": {"data": 2},
    "batch": {"total": 8},
    "train": {
        "steps": 13,
        "optimizer": {"name": "adamw", "lr": 3e-4, "weight_decay": 0.1, "decay": "matrices"},
        "clip": 1.0,
    },
    "compare": {"strategies": [name.replace("-", "/", 1) for name in WAYS.values()], "repeat": 1},
}
UNCOMPARED: Final[Category] = "runtime"
"""Category that depends on what a script does in Python; shown, and not held to `ALLOWED`."""

SMALL: Final = 2**18
"""Bytes below which a difference does not count."""

ALLOWED: Final = 0.02
"""Share by which a category may differ."""


def observe(way: str, folder: Path) -> MemoryAccount:
    """Return the account of rank 0 of the observed script."""
    launcher = ["torchrun", "--standalone", "--nproc-per-node", "2"]
    if way == "horovod":  # the size that unipar gives it: all gradients and a MiB more
        launcher = ["horovodrun", "--fusion-threshold-mb", "35", "-np", "2", sys.executable]
    out = folder / way
    command = [sys.executable, "-m", "unipar", "observe", "--out", str(out), "--", *launcher, str(SCRIPT), way]
    subprocess.run(command, cwd=ROOT, env=environment(), check=True, stdout=subprocess.DEVNULL)
    return read_account(out, 0)


def environment() -> dict[str, str]:
    """Return the environment of the script's processes."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "backends")])
    settings = {"PYTHONPATH": path, "PATH": path_with_scripts(), "OMP_NUM_THREADS": "1", "TORCH_FR_BUFFER_SIZE": "0"}
    return {**os.environ, **METER_ENVIRONMENT, **settings}


def compare(folder: Path) -> Path:
    """Return the folder of a comparison of all strategies."""
    file = folder / "compare.yaml"
    file.write_text(yaml.safe_dump(CONFIG), "utf-8")
    out = folder / "compared"
    command = [sys.executable, "-m", "unipar", "compare", str(file), "--out", str(out)]
    subprocess.run(command, cwd=ROOT, env=environment(), check=True, stdout=subprocess.DEVNULL)
    return out / "compare"


def difference(mine: MemoryAccount, theirs: MemoryAccount, phase: PhaseName) -> tuple[float, str]:
    """Return by how much a category differs at the peak of a phase, as a share, and which does most."""
    here, there = (next(p for p in account.phases if p.name == phase).held for account in (mine, theirs))
    categories: set[Category] = {*here, *there}
    shares = {
        category: abs(here.get(category, 0) - there.get(category, 0)) / max(there.get(category, 0), 1)
        for category in categories - {UNCOMPARED}
        if abs(here.get(category, 0) - there.get(category, 0)) > SMALL
    }
    worst = max(shares, key=lambda name: shares[name], default=None)
    return (0.0, "") if worst is None else (shares[worst], f" {worst}")


def main() -> int:
    """Print the table; return 1 if a script's categories differ by more than is allowed in both phases.

    One phase is enough, since the peak of the other may be a tie of two moments (fsdp2-kept), or a race (horovod).
    """
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        compared = compare(folder)
        rows: list[tuple[str, ...]] = []
        worst = 0.0
        for way, strategy in WAYS.items():
            mine, theirs = observe(way, folder), read_account(compared / strategy, 0)
            found = [difference(mine, theirs, phase) for phase in ("forward", "backward")]
            worst = max(worst, min(share for share, _ in found))
            peaks = (mine.peak.peak, theirs.peak.peak)
            sent = f"{format_mib(sum(mine.sent.values()))} / {format_mib(sum(theirs.sent.values()))}"
            python = " / ".join(f"{account.peak.held.get(UNCOMPARED, 0) / 2**20:.1f}" for account in (mine, theirs))
            rows.append(
                (way, *map(format_mib, peaks), *(f"{share:.1%}{which}" for share, which in found), sent, python)
            )
    head = (
        "script",
        "observed, MiB",
        "compared, MiB",
        "differs in forward",
        "in backward",
        "sent, MiB",
        "runtime, MiB",
    )
    print(format_table(head, rows, right=(1, 2), width=120))
    return int(worst > ALLOWED)


if __name__ == "__main__":
    raise SystemExit(main())
