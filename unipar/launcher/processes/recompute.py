"""`plan_recompute`: the blocks that a run recomputes under `fit`, planned by rank 0 before ranks meet."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unipar.config.settled import SettledConfig
    from unipar.planning.recompute_choice import RecomputeChoice
    from unipar.task import Task


def plan_recompute(settled: SettledConfig, task: Task) -> RecomputeChoice:
    """Return the blocks that a run recomputes; raise ConfigError if no number of them is enough."""
    from unipar.training.fake_run.recompute_fit import choose_for_run  # seconds, which few runs need

    return choose_for_run(settled, task)
