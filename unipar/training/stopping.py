"""Stopping on a signal or at a deadline, at the same step on all ranks; the saver that a loop calls between steps."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol, final

from unipar.distributed.place import LARGE_WORLD
from unipar.errors import Stopped, TaskError

if TYPE_CHECKING:
    from unipar.distributed.world import World

SAME_SIGNAL_SECONDS = 1.0
"""Seconds within which a second signal counts as the first one: launchers forward what the terminal sent already."""

LOOK_SECONDS = 1.0
"""Seconds between two looks for what another rank wishes: one takes some 50 us."""

LOOKS_PER_SECOND = 1000
"""Looks of all ranks together in a second, for which they wait longer in a larger world: rank 0 answers all of them."""

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""Signals after which a run stops: of a scheduler, of a terminal, and a scheduler's warning (`sbatch --signal`)."""

_stop_requested_at: float | None = None
_stop_reason = ""
"""Reason of the stop; "" as long as none is requested."""

_deadline: float | None = None
"""Time of time.monotonic() at which `launch.deadline` is over; None on all ranks but rank 0, whose clock counts."""

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


def request_stop(why: str) -> None:
    """Request a stop of this rank for this reason."""
    global _stop_requested_at, _stop_reason
    if _stop_requested_at is None:
        _stop_requested_at, _stop_reason = time.monotonic(), why


def stop_reason() -> str:
    """Return why the run stops, once all ranks have agreed to."""
    return _stop_reason


@final
class StepAgreement:
    """Agreement of all ranks on a step at the wish of any of them, one after another; no rank waits for another.

    A rank that wishes one says so in the store, where others look once a second. Each rank that knows of it publishes
    its number of steps done; the agreed step is the one after the largest number. No rank passes it unknowing: when a
    step has ended on one rank, all have begun it, so that what they published before is in the store.

    In a world of more than LARGE_WORLD ranks rank 0 alone reads all numbers, and publishes the agreed step: it is one
    later, and after the step that rank 0 is about to begin, so that it is in the store when any rank has come so far.
    """

    def __init__(self, world: World, name: str, every: int = 1) -> None:
        """`every`: steps between two at which all ranks have one state; they agree on such a step."""
        self._world, self._every = world, every
        self._name, self._round = world.key(name), 0
        self._looked = time.monotonic()
        self._look_seconds = max(LOOK_SECONDS, world.size / LOOKS_PER_SECOND)
        self._published = False
        self._agreed: int | None = None
        self.reason = ""
        """Reason of the wish, as far as this rank knows; that of the lowest rank once all have agreed."""

    def __call__(self, step: int, wish: str) -> bool:
        """Return whether `step`, the number of steps done, is the agreed one; called before each step.

        `wish`: why this rank wishes one; "" if it does not.
        """
        world = self._world
        if world.size == 1 or world.store is None:
            self.reason = wish
            return wish != "" and step % self._every == 0
        if not self._published:
            self.reason = wish or self._look()
            if self.reason:
                self._publish(step, wish)
            return False  # this rank's number is one of those that the agreed step comes after
        if self._agreed is None:
            self._read(step)
        if self._agreed is None or step < self._agreed:
            return False
        self._round, self._published, self._agreed = self._round + 1, False, None
        return True

    def _key(self, what: str | int, rounds_ago: int = 0) -> str:
        return f"{self._name}/{self._round - rounds_ago}/{what}"

    def _look(self) -> str:
        """Return the reason of another rank's wish; "" if there is none, or it is not yet time to look."""
        store, now = self._world.store, time.monotonic()
        if store is None or now - self._looked < self._look_seconds:
            return ""
        self._looked = now
        return store.get(self._key("wish")).decode() if store.check([self._key("wish")]) else ""

    def _publish(self, step: int, wish: str) -> None:
        store, rank = self._world.store, self._world.rank
        assert store is not None
        if wish:
            store.set(self._key("wish"), wish)
        store.set(self._key(rank), f"{step} {self.reason}")
        store.get(self._key(rank))  # it is answered when the value is there
        self._published = True
        if self._round > 1:  # all ranks have published in the round before, so that they need no earlier one
            store.delete_key(self._key(rank, 2))
            if wish:
                store.delete_key(self._key("wish", 2))
            if rank == 0:
                store.delete_key(self._key("agreed", 2))

    def _read(self, done: int) -> None:
        """Learn the agreed step if all ranks have published."""
        world = self._world
        if world.rank and world.size > LARGE_WORLD:
            assert world.store is not None
            if world.store.check([self._key("agreed")]):
                step, _, self.reason = world.store.get(self._key("agreed")).decode().partition(" ")
                self._agreed = int(step)
            return
        keys = [self._key(rank) for rank in range(world.size)]
        world.synchronize()  # the device may still be computing earlier steps, which other ranks have not begun
        assert world.store is not None
        if world.store.check(keys):
            requests = [text.decode().partition(" ") for text in world.store.multi_get(keys)]
            last = max(int(number) for number, _, _ in requests) + 1
            if world.size > LARGE_WORLD:
                last = max(last, done + 1) + 1
            self._agreed, self.reason = last + -last % self._every, requests[0][2]
            if world.size > LARGE_WORLD:
                world.store.set(self._key("agreed"), f"{self._agreed} {self.reason}")


class StopAgreement:
    """Agreement of all ranks on the step after which they stop; called before each step."""

    def __init__(self, world: World, every: int = 1) -> None:
        """`every`: steps between two at which all ranks have one state; they stop at such a step."""
        self._world, self._agreement = world, StepAgreement(world, "stop", every)

    def __call__(self, step: int) -> None:
        """Raise Stopped if a stop was requested and `step`, the number of steps done, is the agreed last one."""
        global _stop_reason
        if self._world.size == 1 and _stop_requested_at is None and _deadline is None:
            return
        agreed = self._agreement(step, _stop_reason if stop_requested() else "")
        if self._agreement.reason:
            request_stop(self._agreement.reason)
        if agreed:
            _stop_reason = self._agreement.reason
            self._world.barrier()  # until all ranks have read the store, which may be in a rank that exits first
            raise Stopped(f"stopped by {_stop_reason} after step {step}")


class StateKeeper(Protocol):
    """Saver of a run's state; all ranks call its methods together."""

    def at_boundary(self, done: int) -> None:
        """Save if a save is due after `done` steps."""
        ...

    def save(self, done: int) -> None:
        """Save the state after `done` steps."""
        ...

    def publish_pending(self) -> None:
        """Wait until a save that has begun is published."""
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
        raise TaskError("run.save() was called within a local batch: call it before the next step, or after the loop")
    if every is not None and done % every:
        raise TaskError(
            f"run.save() was called after step {done}: with train.local_steps: {every} ranks have one state only after "
            f"every {every} steps"
        )
    return keeper
