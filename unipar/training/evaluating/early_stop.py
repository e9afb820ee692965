"""Early stop: a run ends when a metric of its evaluations has not improved for a while, on all ranks at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, final

from unipar.config.config import EarlyStopRule
from unipar.distributed.world import World
from unipar.errors import TaskError


@final
@dataclass(frozen=True)
class StopState:
    """State on which the decision depends; checkpoints hold it."""

    metric: str
    mode: str
    best: float | None = None
    """Best value so far; None: no evaluation gave a finite one."""

    best_step: int | None = None
    """Step after which it was found."""

    missed: int = 0
    """Evaluations since then."""

    step: int | None = None
    """Step after which the last of them was made."""


@final
class EarlyStop:
    """Decision on an early stop, made by rank 0 for all after each evaluation; the same calls are made on all ranks."""

    def __init__(self, rule: EarlyStopRule, world: World, note: Callable[..., None]) -> None:
        """`note` writes an event into the run log."""
        self._rule, self._world, self._note = rule, world, note
        self._state = StopState(rule.metric, rule.mode)

    @property
    def is_reached(self) -> bool:
        """Whether the run ends now."""
        return self._state.missed >= self._rule.patience

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds of it."""
        return asdict(self._state)

    def go_on_from(self, saved: Mapping[str, Any] | None) -> None:
        """Go on from a checkpoint's state; from the beginning if it has none, or that of another metric."""
        if saved is not None and (saved["metric"], saved["mode"]) == (self._rule.metric, self._rule.mode):
            self._state = StopState(**saved)
            if self.is_reached:
                self._tell()

    def after_evaluation(self, done: int, values: Mapping[str, float]) -> None:
        """Count an evaluation after `done` steps; a second one after the same step is not counted."""
        if self._rule.metric not in values:
            raise TaskError(
                f"eval.stop.metric: the evaluation has no {self._rule.metric!r}; it has "
                + (", ".join(values) or "none")
            )
        if done == self._state.step:
            return
        self._state = self._world.tell_objects(self._counted(done, values[self._rule.metric]), 0)
        if self.is_reached:
            self._tell()

    def _counted(self, done: int, value: float) -> StopState:
        state, sign = self._state, 1.0 if self._rule.mode == "min" else -1.0
        if math.isfinite(value) and (state.best is None or sign * value < sign * state.best):
            return replace(state, best=value, best_step=done, missed=0, step=done)
        return replace(state, missed=state.missed + 1, step=done)

    def _tell(self) -> None:
        state = self._state
        best = "it never was a finite number"
        if state.best is not None:
            best = f"the best was {state.best:.6g}, after step {state.best_step}"
        self._note(
            "early stop",
            step=state.step,
            said=f"eval.stop: {state.metric} has not improved in {state.missed} "
            f"evaluation{'s' if state.missed > 1 else ''} ({best}): the run ends after step {state.step}",
        )
