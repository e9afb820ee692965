"""Restarts of a run whose ranks failed: which errors are worth one, how long to wait before it, what is shown."""

from __future__ import annotations

import select
import time
from dataclasses import dataclass

from unipar.errors import OutOfMemory, UniparError, WorkerFailed
from unipar.launcher.preparation.prepared_run import PreparedRun
from unipar.launcher.processes.forkserver import ForkServerFailed
from unipar.launcher.processes.postmortem import make_stopped_error
from unipar.launcher.processes.signals import SignalReceiver
from unipar.launcher.progress import Progress
from unipar.run_folder.run_attempts import count_attempts
from unipar.utils.files import relative_path
from unipar.utils.text import count_of

LONGEST_PAUSE_SECONDS = 60.0
"""The longest wait before a restart."""


def is_worth_restart(error: BaseException) -> bool:
    """Return whether a run with this error may do better when it starts again.

    A rank that failed, hung, was killed or ran out of memory may; what the config, the task or the state is wrong
    about fails again.
    """
    return isinstance(error, (WorkerFailed, OutOfMemory, ForkServerFailed))


def pause_before(restart: int) -> float:
    """Return the seconds to wait before the first, second, ... restart: 1, 2, 4, ..., at most 60."""
    return min(LONGEST_PAUSE_SECONDS, 2.0 ** min(restart - 1, 30))


@dataclass
class Restarts:
    """Restarts of one run, counted."""

    shown: Progress
    script: tuple[str, ...] = ()
    """Script that the ranks run again, for launch.json."""

    count: int = 0
    """Number of restarts so far."""

    def next_attempt(self, plan: PreparedRun, error: UniparError) -> PreparedRun:
        """Return the next attempt of a run, after a pause; raise its error again if none is left, or would help."""
        of = plan.config.launch.restarts
        if not of or not is_worth_restart(error):
            raise error
        self.shown.tick()  # what the ranks printed and logged last
        if self.count == of:
            self.shown.say(f"launch.restarts: {count_of(of, 'restart')} made, none left")
            raise error
        self.count += 1
        pause = pause_before(self.count)
        with SignalReceiver() as signals:
            plan = plan.next_attempt(self.script, error)
            first, *_ = str(error).splitlines()
            self.shown.say(first)
            kept = relative_path(plan.out / f"attempt-{count_attempts(plan.out)}")
            self.shown.say(f"restart {self.count} of {of} in {pause:g} s: {plan.describe_start()}; logs so far: {kept}")
            self._wait(plan, pause, signals)
        self.shown.begin_attempt()
        return plan

    def _wait(self, plan: PreparedRun, seconds: float, signals: SignalReceiver) -> None:
        """Wait so long; a signal, which may have come before, stops the run."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            select.select([signals], [], [], min(left, self.shown.every))
            if signals.received_signals:
                raise make_stopped_error(plan.out.resolve(), plan.size, signals.received_signals[0].name)
            self.shown.tick()
