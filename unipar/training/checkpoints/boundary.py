"""`StateKeeper`: the calls that a training loop makes to its saver, between two steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from unipar.errors import TaskError


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
