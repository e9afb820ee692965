"""Stopping on a signal or at a deadline, at the same step on all ranks; the saver that a loop calls between steps."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

from unipar.errors import Stopped, TaskError

if TYPE_CHECKING:
    from unipar.distributed.world import World

SAME_SIGNAL_SECONDS = 1.0
"""Seconds within which a second signal counts as the first one: launchers forward what the terminal sent already."""

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""Signals after which a run stops: of a scheduler, of a terminal, and a scheduler's warning (`sbatch --signal`)."""

_stop_requested_at: float | None = None
_stop_reason = ""
"""Reason as far as this rank knows it; "" if another rank has it."""

_deadline: float | None = None
"""Time of time.monotonic() at which `launch.deadline` is over; None on ranks that do not look."""

_previous_handlers: dict[int, Any] = {}
"""Handlers that were installed before those of `stop_on_signals`, by signal."""


@contextmanager
def stop_on_signals(deadline: float | None = None) -> Generator[None]:
    """Context manager: a signal requests a stop of the run instead of ending the process at once.

    `deadline`: time of time.monotonic() that does so too.
    """
    global _stop_requested_at, _stop_reason, _deadline
    _stop_requested_at, _stop_reason, _deadline = None, "", deadline
    if threading.current_thread() is not threading.main_thread():
        yield  # Python allows signal handlers in the main thread only
        return
    _previous_handlers.update({number: signal.signal(number, _handle_signal) for number in STOP_SIGNALS})
    try:
        yield
    finally:
        for number, handler in _previous_handlers.items():
            signal.signal(number, handler)
        _previous_handlers.clear()


def _handle_signal(number: int, frame: FrameType | None) -> None:
    """Request a stop; pass a second signal, SAME_SIGNAL_SECONDS or more after the first, to the previous handler."""
    if _stop_requested_at is not None and time.monotonic() - _stop_requested_at < SAME_SIGNAL_SECONDS:
        return
    if _stop_requested_at is not None and _previous_handlers:
        for which, handler in _previous_handlers.items():
            signal.signal(which, handler)
        signal.raise_signal(number)
    request_stop("a signal")


def stop_requested() -> bool:
    """Return whether this process got a signal or is past its deadline, or learned that another rank did or is."""
    if _stop_requested_at is None and _deadline is not None and time.monotonic() >= _deadline:
        request_stop("launch.deadline")
    return _stop_requested_at is not None


def request_stop(why: str = "") -> None:
    """Request a stop of this rank; `why` is "" if another rank knows the reason."""
    global _stop_requested_at, _stop_reason
    if _stop_requested_at is None:
        _stop_requested_at, _stop_reason = time.monotonic(), why


def stop_reason() -> str:
    """Return why the run stops, once all ranks have agreed to."""
    return _stop_reason


class StopAgreement:
    """Agreement of all ranks on the step after which they stop; called before each step.

    Each rank that knows of the stop publishes its number of steps done; all stop one step after the largest number. No
    rank waits for another: that one may be inside a collective that needs this rank.
    """

    def __init__(self, world: World, every: int = 1) -> None:
        """`every`: steps between two at which all ranks have one state; they stop at such a step."""
        self._world, self._every = world, every
        self._published = False
        self._last_step: int | None = None

    def __call__(self, step: int) -> None:
        """Raise Stopped if a stop was requested and `step`, the number of steps done, is the agreed last one."""
        if stop_requested():
            self._agree(step)

    def _agree(self, step: int) -> None:
        world = self._world
        if world.size == 1 or world.store is None:
            if step % self._every:
                return
            raise Stopped(f"stopped by {_stop_reason} after step {step}")
        keys = [f"stop/{rank}" for rank in range(world.size)]
        if not self._published:
            self._published = True
            if world.device.type == "cuda":
                world.synchronize()  # the GPU may still be computing earlier steps
            world.store.set(keys[world.rank], f"{step} {_stop_reason}")
        if self._last_step is None and world.store.check(keys):
            told = [world.store.get(key).decode().partition(" ") for key in keys]
            _learn_reason(why for _, _, why in told)
            last = max(int(done) for done, _, _ in told) + 1
            self._last_step = last + -last % self._every
        if self._last_step is not None and step >= self._last_step:
            world.barrier()  # until all ranks have read the store, which may be in a rank that exits first
            raise Stopped(f"stopped by {_stop_reason} after step {step}")


def _learn_reason(told: Iterable[str]) -> None:
    """Take the reason of the first rank that knows one, as all ranks do."""
    global _stop_reason
    _stop_reason = next((why for why in told if why), _stop_reason)


class StateKeeper(Protocol):
    """Saver of a run's state; all ranks call its methods together."""

    @property
    def wants_to_save(self) -> bool:
        """Whether this rank's clock says that a save is due."""
        ...

    def at_boundary(self, done: int) -> None:
        """Save if a save is due after `done` steps."""
        ...

    def save(self, done: int) -> None:
        """Save the state after `done` steps."""
        ...

    def at_end(self, done: int) -> None:
        """Save the last state, and wait until it is published."""
        ...

    def after_evaluation(self, done: int, metrics: Mapping[str, float]) -> None:
        """Keep what an evaluation gave."""
        ...


def require_keeper(keeper: StateKeeper | None, done: int, every: int | None, *, idle: bool) -> StateKeeper:
    """Return the saver for a call of `run.save()` after `done` steps; raise TaskError if it cannot save now."""
    if keeper is None:
        raise TaskError("run.save() needs the config's section checkpoint, which says where and what is kept")
    if not idle:
        raise TaskError("run.save() was called within a share: call it before the next step, or after the loop")
    if every is not None and done % every:
        raise TaskError(
            f"run.save() was called after step {done}: with train.sync_every: {every} ranks have one state only after "
            f"every {every} steps"
        )
    return keeper
