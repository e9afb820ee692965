"""`StepPhases`: phases and steps of a training loop, told from the calls that it makes. It needs no torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Set
from typing import Final, Literal, Protocol, final

Phase = Literal["start", "data", "forward", "backward", "update", "between"]

LEARNED_AFTER: Final = 2
"""Number of steps after which the number of backwards in a step counts as known."""

MOST_MERGED: Final = 10
"""Number of first steps that can turn out to be parts of one, because another optimizer takes its first step later."""

STEPS_WAITED: Final = 16
"""Steps of one optimizer without one of another after which the other counts as gone, or more if more were usual."""


class StepListener(Protocol):
    """Whoever wants to know of steps."""

    def on_step_begin(self, step: int) -> None:
        """Note that a step begins: its data are read, its gradients dropped, or its backward runs."""
        ...

    def on_step_end(self, step: int) -> None:
        """Note that a step has ended: another one begins."""
        ...

    def on_steps_merged(self) -> None:
        """Note that the steps until now were parts of one: another optimizer belongs to each."""
        ...


@final
class StepPhases:
    """State machine that finds phases and steps.

    A step is over when each of the script's optimizers has taken one, and the script goes on: it reads data, drops
    gradients or calls backward. What runs after that is forward, until backward is called. In a loop that gathers
    gradients, forward comes after each backward but the last, whose number the first steps tell.
    """

    def __init__(self, listener: StepListener, clock: Callable[[], float] = time.perf_counter) -> None:
        self._listener, self._clock = listener, clock
        self.on_phase: Callable[[str], None] | None = None
        """Function that is called with each new phase."""

        self.phase: Phase = "start"
        self.step = 0
        """Number of the present step, from 1; 0 before the first."""

        self.seconds: dict[Phase, float] = {}
        """Seconds of the present step by phase."""

        self.backwards = 0
        """Number of backwards in the present step."""

        self.skipped = False
        """Whether the present step was skipped by loss scaling."""

        self._expected_backwards = 0
        self._optimizers: set[Hashable] = set()
        self._updated: dict[Hashable, int] = {}
        self._patience = STEPS_WAITED
        self._updating = 0
        self._running = False
        self._in_backward = False
        self._since = clock()

    def data_begins(self) -> None:
        """Note that the script asks for a batch."""
        self._updating = 0
        self._go_on()
        self._enter("data")

    def data_ends(self, *, trains: bool = True) -> None:
        """Note that it has one; `trains`: whether gradients are recorded."""
        if self.phase == "data":
            self._enter("forward" if trains else "between")

    def gradients_dropped(self) -> None:
        """Note a call of zero_grad."""
        if self.phase in ("start", "between") or not self._optimizers:
            self._go_on()
            self._enter("forward")

    def backward_begins(self) -> None:
        """Note a call of backward."""
        self._go_on()
        self.backwards += 1
        self._in_backward = True
        self._enter("backward")

    def backward_ends(self) -> None:
        """Note its return."""
        self._in_backward = False
        if self._updating:  # an optimizer that computes the loss within its step
            self._enter("update")
        elif self._updated:  # optimizers that take their step in backward
            self._enter("between")
        elif self._expected_backwards and self.backwards < self._expected_backwards:
            self._enter("forward")

    def clip_begins(self) -> None:
        """Note that gradients are clipped."""
        if self._running and not self._in_backward:
            self._enter("update")

    def update_begins(self, optimizer: Hashable) -> None:
        """Note that an optimizer takes a step."""
        if optimizer not in self._optimizers:
            another = bool(self._optimizers)
            self._optimizers.add(optimizer)
            if another and 1 < self.step <= MOST_MERGED:
                self._merge()
        if not self._running:
            self._begin()
        self._updated[optimizer] = updates = self._updated.get(optimizer, 0) + 1
        if updates > self._patience:
            self._optimizers &= self._updated.keys()
        self._updating += 1
        if not self._in_backward:
            self._enter("update")

    def update_ends(self) -> None:
        """Note that the optimizer has taken it."""
        self._updating = max(0, self._updating - 1)
        if self.phase == "update" and not self._updating:
            self._enter("between" if self._updated.keys() >= self._optimizers else "forward")

    def keep_optimizers(self, alive: Set[Hashable]) -> None:
        """Expect no step of optimizers that the script has no more."""
        self._optimizers &= alive

    def finish(self) -> None:
        """Note that the script ends: a complete step is over."""
        if self.is_complete:
            self._end()

    def scaler_updated(self) -> None:
        """Note that loss scaling ends an update; without a step of an optimizer, it was skipped."""
        if self._running and not self._updated and self.backwards:
            self.skipped = True
            self._enter("between")

    @property
    def is_complete(self) -> bool:
        """Whether every optimizer of the script has taken a step in the present one, or it was skipped."""
        if self.phase != "between":
            return False
        return self.skipped or (bool(self._updated) and self._updated.keys() >= self._optimizers)

    def _go_on(self) -> None:
        if self.phase == "between" and self.is_complete:
            self._end()
        if not self._running:
            self._begin()

    def _begin(self) -> None:
        self.step += 1
        self._running = True
        self._listener.on_step_begin(self.step)

    def _end(self) -> None:
        self._add_time()
        self._listener.on_step_end(self.step)
        if self.step <= LEARNED_AFTER:
            self._expected_backwards = self.backwards
        self._patience = max(self._patience, 2 * max(self._updated.values(), default=0))
        self.backwards, self.skipped, self._running = 0, False, False
        self.seconds = {}
        self._updated.clear()

    def _merge(self) -> None:
        """Count the steps until now as parts of the first one."""
        self._patience = max(self._patience, 2 * self.step)
        self.step, self._expected_backwards = 1, 0
        for optimizer in self._optimizers:
            self._updated[optimizer] = self._updated.get(optimizer, 0) + 1
        self._listener.on_steps_merged()

    def _enter(self, phase: Phase) -> None:
        if phase != self.phase or phase in ("data", "backward"):
            self._add_time()
            self.phase = phase
            if self.on_phase is not None:
                self.on_phase(phase)

    def _add_time(self) -> None:
        now = self._clock()
        self.seconds[self.phase] = self.seconds.get(self.phase, 0.0) + now - self._since
        self._since = now
