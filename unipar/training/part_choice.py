"""`PartChoice`: the parts of a run by name, and which of them takes a step or is evaluated now."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, final

from unipar.backend import Engine, Fn
from unipar.errors import TaskError
from unipar.training.trained_parts import ActivePart, TrainedPart, refuse_other_loss

if TYPE_CHECKING:
    from collections.abc import Generator

    from unipar.config import Config
    from unipar.task import Task


@final
class PartChoice:
    """Parts of a run: which one a call of `run.step` means, and how a loss or metrics call the others."""

    def __init__(self, parts: Mapping[str, TrainedPart], task: Task, config: Config) -> None:
        self._members = {name: ActivePart(part, parts) for name, part in parts.items()}
        self.first = next(iter(self._members.values()))
        self.alone = len(self._members) == 1
        """Whether there is one part only."""

        self._task, self._config = task, config
        self.active: ActivePart | None = None
        """Part that takes a step, or is evaluated, now: its loss or metrics may call others."""

        self._evaluating = False

    def member(self, part: str) -> ActivePart:
        """Return a part by its name."""
        if part not in self._members:
            raise TaskError(f"there is no part {part!r}; name one of {', '.join(self._members)}")
        return self._members[part]

    def select(self, part: str | None, loss: object, stepped: Sequence[ActivePart]) -> ActivePart:
        """Return the part that a call of `run.step` means; `stepped`: those that took a step on this local batch."""
        refuse_other_loss(loss, self._task.loss, self._config)
        if part is None:
            if self.alone:
                return self.first
            raise TaskError(
                f"run.step was called without part=: model() returned {', '.join(self._members)}; call "
                f"run.step(local_batch, part={next(iter(self._members))!r}, loss=...)"
            )
        chosen = self.member(part)
        if loss is None and chosen is not self.first:
            own = self.first.trained.name
            raise TaskError(f"run.step(part={part!r}) has no loss: the task's own is for {own!r}; give loss=")
        if chosen in stepped:
            raise TaskError(
                f"the loop called run.step(part={part!r}) twice for one local batch; call it at most once for each part"
            )
        return chosen

    def check_through(self, through: Mapping[str, object], part: str) -> None:
        """Raise TaskError unless one loss can go through these parts into another one."""
        self.member(part)
        if not through or part in through:
            others = ", ".join(f"{name!r}: ..." for name in self._members if name != part)
            raise TaskError(
                f"run.step_through(part={part!r}) takes functions of other parts, whose outputs its loss needs: "
                f"through={{{others}}}; it got {', '.join(through) or 'none'}"
            )
        for name in through:
            self.member(name)

    def engine(self, part: str | None) -> Engine:
        """Return the engine of a part, or of the first."""
        return (self.first if part is None else self.member(part)).trained.engine

    def is_busy(self) -> bool:
        """Return whether a part takes a step, or is evaluated, now."""
        return self.active is not None

    @contextmanager
    def forward_of(self, part: ActivePart, *, evaluating: bool = False) -> Generator[None]:
        """Context manager: this part runs forward alone, or is evaluated, so that a loss or metrics may call others."""
        self.active, self._evaluating = part, evaluating
        try:
            yield
        finally:
            self.active, self._evaluating = None, False

    def frozen(self, part: str) -> Callable[[Fn, Any], Any]:
        """Return the function by which a loss or metrics call another part, as `Run.frozen` does."""
        other = self.member(part)
        if self.active is None:
            raise TaskError(f"run.frozen({part!r}) was called outside of a loss and metrics: call it in one of them")
        if other is self.active:
            raise TaskError(
                f"run.frozen({part!r}) was called in that part's own loss: use the loss's first argument, its model"
            )
        engine = other.trained.engine
        return engine.evaluate if self._evaluating else engine.call_frozen
