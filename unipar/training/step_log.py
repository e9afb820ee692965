"""Log of a run: which steps are logged, and what the ledger and the trackers get."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, final

from unipar.run_folder.ledger import Ledger
from unipar.tracking.writer import TrackerWriter
from unipar.training.parts import TrainedPart, collect_step_values, flatten_logged_step

if TYPE_CHECKING:
    from unipar.memory.recording.step_log import StepMemory


@final
class StepLog:
    """Log of one rank: the first step, then every so many, and the last."""

    def __init__(self, ledger: Ledger, trackers: TrackerWriter, every: int, scale: float) -> None:
        """`scale`: factor of the learning rate, for the one that is logged."""
        self._ledger, self._trackers, self._every, self._scale = ledger, trackers, every, scale
        self._since_log = self._timed = self._samples = 0
        self._since = time.perf_counter()
        self._memory: StepMemory | None = None

    def begin_after(self, done: int) -> None:
        """Go on after so many steps of another run: the same steps are logged as if it had not ended."""
        self._since_log = (done - 1) % self._every if done else 0
        self._since = time.perf_counter()

    def attach_memory(self, recorder: StepMemory) -> None:
        """Record the memory of logged steps by `recorder`."""
        self._memory = recorder

    def before_step(self, number: int, steps: int) -> None:
        """Begin to record memory if step `number` of `steps` will be logged."""
        if self._memory is not None:
            at = time.perf_counter()
            self._memory.before(logs=self._logs(number, steps, self._since_log + 1))
            self._since += time.perf_counter() - at  # not counted as time of a step

    def count(self, samples: int) -> None:
        """Count a share, of a global batch of so many samples, that takes a step."""
        self._since_log, self._timed, self._samples = self._since_log + 1, self._timed + 1, samples

    def is_due(self, number: int, steps: int) -> bool:
        """Return whether step `number` of `steps`, which is counted, is logged."""
        return self._logs(number, steps, self._since_log)

    def _logs(self, number: int, steps: int, filled: int) -> bool:
        return filled == self._every or number == steps or number == 1

    def write_step(self, number: int, steps: int, parts: Mapping[str, TrainedPart]) -> None:
        """Write what the parts report of step `number` of `steps`."""
        now = time.perf_counter()
        seconds = (now - self._since) / self._timed
        self._since_log = self._timed = 0
        row = collect_step_values(parts, self._scale) | {"samples": self._samples, "seconds": seconds}
        if self._memory is not None:
            row["memory"] = [phase.model_dump(exclude={"largest"}) for phase in self._memory.after()]
            if self._memory.lost:
                self._ledger.note("memory", said=f"no longer recorded: {self._memory.lost}")
                self._memory = None
        self._ledger.note("step", step=number, of=steps, **row)
        self._trackers.write(number, flatten_logged_step(row))
        self.restart_clock()

    def restart_clock(self) -> None:
        """Begin to time now: what was done since the last step is not counted as time of a step."""
        self._since = time.perf_counter()

    def write_values(self, event: str, step: int, named: Mapping[str, float]) -> None:
        """Write named values of an evaluation, or of the user's."""
        self._ledger.note(event, step=step, **named)
        self._trackers.write(step, {f"{event}/{k}": v for k, v in named.items()})

    def note(self, event: str, **fields: Any) -> None:
        """Write an event into the ledger alone."""
        self._ledger.note(event, **fields)

    def close(self) -> None:
        """Close the trackers."""
        self._trackers.close()
