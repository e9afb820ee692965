"""`batch.micro: auto` beside a search by hand: `python -m benchmarks.micro_batch [native/nothing 48MiB]`.

By hand every divisor of a rank's share is tried. Exit 1: a row differs.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from unipar.backend import checks, registry
from unipar.backend import offered_strategies as strategies
from unipar.config import Strategy
from unipar.config.config_source import load_given_config
from unipar.config.settled import SettledConfig
from unipar.errors import OutOfMemory, Stopped, UniparError
from unipar.launcher.micro_batch.choice import CandidateWorld, list_candidates, with_micro
from unipar.launcher.micro_batch.choose import choose_microbatch, write_line
from unipar.launcher.micro_batch.trials import TrialCode, Trials
from unipar.task.reference import TaskRef
from unipar.utils.table import format_table
from unipar.utils.text import format_duration, parse_bytes

ROOT = Path(__file__).parent.parent
STRATEGIES = ("native/nothing", "native/parameters", "deepspeed/gradients", "horovod/nothing", "accelerate/parameters")
LIMITS = ("32MiB", "64MiB")
RANKS = 2
SETTINGS: dict[str, Any] = {
    "task": {
        "use": f"{ROOT}/examples/char_gpt.py:CharGPT",
        "args": {"layers": 3, "width": 128, "heads": 4, "context": 64},
    },
    "device": "cpu",
    "parallel": {"data": RANKS},
    "batch": {"total": 96, "micro": 1},
    "train": {"steps": 10, "optimizer": {"lr": 3e-4}},
}


def world_of(name: str) -> CandidateWorld:
    """Return the world of a strategy, with every divisor of a rank's share."""
    strategy = Strategy.parse(name)
    backend = registry.find_backend(strategy.backend)
    config = strategies.config_in_strategy(load_given_config(SETTINGS, None).config, strategy)
    checks.check_strategy(config, backend, strategy)
    sizes = list_candidates(config, backend, strategy, RANKS)
    return CandidateWorld(SettledConfig.of(with_micro(config, sizes[0]), strategy, RANKS, "cpu"), backend, sizes)


def search_by_hand(world: CandidateWorld, code: TrialCode, limit: int) -> tuple[int | None, int]:
    """Return the largest microbatch that fits after a trial of every size, and the number of trials."""
    with Trials(code, [world], limit, write_line) as trials:
        fitting = [micro for micro in world.candidates if trials.fits(world, micro)]
    return max(fitting, default=None), len(trials.done)


def search_by_auto(world: CandidateWorld, code: TrialCode, limit: int) -> tuple[int | None, int, str]:
    """Return the microbatch that auto picks, the number of trials, and what the plan said."""
    try:
        chosen = choose_microbatch([world], code, limit, write_line)
    except OutOfMemory:
        return None, 0, ""
    return chosen.micro, len(chosen.trials), str(chosen.planned.get(world.name, "not planned"))


def main(words: list[str]) -> int:
    """Search in each strategy within each limit in both ways, and print the table; return the exit code."""
    limits = [word for word in words if "/" not in word] or list(LIMITS)
    rows: list[tuple[str, ...]] = []
    differ = 0
    for name in [word for word in words if "/" in word] or STRATEGIES:
        world = world_of(name)
        code = TrialCode(TaskRef.of(None, world.settled.config.task, {}))
        for limit in limits:
            try:
                began = time.monotonic()
                auto, tried, planned = search_by_auto(world, code, int(parse_bytes(limit)))
                between = time.monotonic()
                hand, all_tried = search_by_hand(world, code, int(parse_bytes(limit)))
            except Stopped:
                raise
            except UniparError as e:
                rows.append((name, limit, f"failed: {e}"))
                differ += 1
                continue
            took = [format_duration(seconds) for seconds in (between - began, time.monotonic() - between)]
            differ += auto != hand
            same = "same" if auto == hand else "OTHER"
            rows.append(
                (name, limit, planned, str(auto), str(tried), took[0], str(hand), str(all_tried), took[1], same)
            )
            print(*rows[-1], flush=True)
    header = ("strategy", "limit", "plan", "auto", "trials", "in", "by hand", "trials", "in", "")
    print(format_table(header, rows, right=(1, 2, 3, 4, 5, 6, 7, 8), width=110))
    print(f"{len(rows) - differ} of {len(rows)} the same; {RANKS} ranks, a batch of {SETTINGS['batch']['total']}")
    return int(differ > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
