"""Runs to which something happens: `python -m tests.support.disturbed_runs FOLDER STRATEGY FAULT SEED`.

It prints, as JSON, the exit code, the seconds from the fault to the end, the last lines, and what is wrong.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.private import enter_private_network, take_down_loopback
from tests.support.run_logs import rows_of
from tests.support.training_kills import END, START, endless_config, pid_of_rank, start_run, wait_until_trained
from tests.support.world import ROOT, eventually, is_running
from unipar.checkpoint.protocol.verifying import find_checkpoints, verify_checkpoint
from unipar.errors import CheckpointError

HEARTBEAT, TIMEOUT = 4.0, 8.0
"""Limits of a run that is made to hang."""

NAN_AT = 6
"""Step at which one rank's loss is not a number."""


@dataclass
class Disturbed:
    """Result of one run."""

    strategy: str
    fault: str
    code: int = 0
    seconds: float = 0.0
    said: str = ""
    faults: list[str] = field(default_factory=list[str])
    """What was not as it was promised."""


class _Run:
    """A run that trains, and how it ends."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        self.folder, self.run = folder, folder / "runs" / "disturbed"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "disturbed.json").write_text(json.dumps(config), "utf-8")
        self.process = start_run(folder, "disturbed")

    @property
    def said(self) -> str:
        return (self.folder / "said.txt").read_text("utf-8", errors="replace")

    def pids(self) -> list[int]:
        return [pid for rank in (0, 1) if (pid := pid_of_rank(self.run, rank)) is not None]

    def ends(self, played: Disturbed, since: float) -> None:
        """Wait until all is over, and note how it ended."""
        pids = self.pids()
        played.code = self.process.wait(START)
        played.seconds = time.monotonic() - since
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)  # of a stopped rank that outlives the run
        eventually(lambda: not any(map(is_running, pids)), f"{played.strategy}: ranks outlive {played.fault}", END)
        played.said = "\n".join(self.said.splitlines()[-6:])

    def last_step(self) -> int:
        return max((row["step"] for row in rows_of(self.run, "step")), default=0)

    def verify_all(self, played: Disturbed) -> int:
        """Verify each published checkpoint; return the newest step."""
        found = find_checkpoints(self.run / "checkpoints")
        for one in found:
            try:
                verify_checkpoint(one.path)
            except CheckpointError as e:
                played.faults.append(str(e))
        return found[0].step if found else 0


def _stop_by_signal(run: _Run, played: Disturbed, draw: random.Random) -> None:
    """Send SIGTERM or SIGUSR1: the state of the last step is saved, the exit code is 130."""
    time.sleep(draw.uniform(0.0, 1.0))
    os.kill(run.process.pid, draw.choice([signal.SIGTERM, signal.SIGUSR1]))
    run.ends(played, time.monotonic())
    _expect(played, played.code == 130, f"the exit code is {played.code}, not 130")
    newest, last = run.verify_all(played), run.last_step()
    _expect(played, newest >= last > 0, f"step {last} was logged, and the newest checkpoint is of step {newest}")


def _stop_twice(run: _Run, played: Disturbed, draw: random.Random) -> None:
    """Send SIGTERM twice: every checkpoint is whole, whatever the second one interrupts."""
    time.sleep(draw.uniform(0.0, 1.0))
    os.kill(run.process.pid, signal.SIGTERM)
    time.sleep(draw.uniform(0.0, 0.05))
    with suppress(ProcessLookupError):
        os.kill(run.process.pid, signal.SIGTERM)
    run.ends(played, time.monotonic())
    _expect(played, played.code != 0, "the exit code is 0")
    run.verify_all(played)


def _stop_a_rank(run: _Run, played: Disturbed, draw: random.Random) -> None:
    """Stop one rank by SIGSTOP: it is named as hung within the heartbeat and 5 s."""
    rank = draw.choice([0, 1])
    os.kill(run.pids()[rank], signal.SIGSTOP)
    run.ends(played, time.monotonic())
    _expect(played, f"rank {rank}" in played.said, f"rank {rank} is not named: {played.said}")
    _expect(played, "stopped" in played.said or "hung" in played.said, f"not told to hang: {played.said}")
    _expect(played, played.code == 1, f"the exit code is {played.code}, not 1")
    _expect(played, played.seconds <= HEARTBEAT + 5.0, f"it took {played.seconds:.1f} s")
    run.verify_all(played)


def _cut_the_network(run: _Run, played: Disturbed, draw: random.Random) -> None:
    """Take the loopback away: all ends within the limit of a collective and 5 s."""
    time.sleep(draw.uniform(0.0, 0.5))
    take_down_loopback()
    run.ends(played, time.monotonic())
    _expect(played, played.code == 1, f"the exit code is {played.code}, not 1")
    _expect(played, played.seconds <= TIMEOUT + 5.0, f"it took {played.seconds:.1f} s")
    run.verify_all(played)


def _not_a_number(run: _Run, played: Disturbed, draw: random.Random) -> None:
    """Let rank 1's loss be no number at one step: all stop, and nothing behind it is published."""
    run.ends(played, time.monotonic())
    split = "+" in played.strategy  # then rank 0 speaks for the loss of both, and rank 1's gradients tell
    wanted = "a gradient was not finite" if split else f"is not finite at step {NAN_AT}, first on rank 1"
    _expect(played, wanted in " ".join(played.said.split()), f"not told: {played.said}")
    _expect(played, played.code == 1, f"the exit code is {played.code}, not 1")
    newest = run.verify_all(played)
    _expect(played, 0 < newest < NAN_AT, f"a checkpoint of step {newest} is there")


def _expect(played: Disturbed, holds: bool, fault: str) -> None:
    if not holds:
        played.faults.append(fault)


FAULTS: Mapping[str, Callable[[_Run, Disturbed, random.Random], None]] = {
    "SIGTERM or SIGUSR1": _stop_by_signal,
    "a second SIGTERM": _stop_twice,
    "SIGSTOP of a rank": _stop_a_rank,
    "network cut": _cut_the_network,
    "NaN on one rank": _not_a_number,
}


def _config_for(fault: str, strategy: str) -> dict[str, Any]:
    config = endless_config(strategy)
    if fault in ("SIGTERM or SIGUSR1", "a second SIGTERM"):
        config |= {"data": {"workers": 1}}
    if fault in ("SIGSTOP of a rank", "network cut"):
        config |= {"launch": {"heartbeat": HEARTBEAT, "timeout": TIMEOUT}}
    if fault == "NaN on one rank":
        use = f"{ROOT}/tests/support/not_a_number.py:Poisoned"
        args = {**config["task"]["args"], "step": NAN_AT}
        config |= {"task": {"use": use, "args": args}, "checkpoint": {"every": 2, "keep": 9}}
    return config


def disturb(folder: Path, strategy: str, fault: str, seed: int) -> Disturbed:
    """Start a run of a strategy, let a fault happen, and return how it ended."""
    played = Disturbed(strategy, fault)
    run = _Run(folder, _config_for(fault, strategy))
    try:
        wait_until_trained(run.process, run.folder, run.run)
        FAULTS[fault](run, played, random.Random(f"{strategy} {fault} {seed}"))
    finally:
        if run.process.poll() is None:
            run.process.kill()
            run.process.wait()
    return played


def main() -> None:
    """Print the result as JSON."""
    folder, strategy, fault, seed = sys.argv[1:]
    if fault == "network cut":
        enter_private_network()
    print(json.dumps(vars(disturb(Path(folder), strategy, fault, int(seed)))))


if __name__ == "__main__":
    main()
