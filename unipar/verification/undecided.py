"""Strategies in which near-ties of routers differ: they run once more with the experts that one process chooses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from unipar.errors import UniparError
from unipar.verification.judgement.record import RunRecord, combine_ranks
from unipar.verification.runs import RunPlan
from unipar.verification.worker.jobs import RunKey
from unipar.verification.worker.recorded import write_recorded
from unipar.verification.world_pool import JobResult, WorldPool, group_jobs_by_library


def run_with_choices(
    runs: RunPlan, worlds: WorldPool, strategies: Sequence[str], say: Callable[[str], None]
) -> Iterator[tuple[str, RunRecord, int]]:
    """Yield each of these strategies with its record, and the number of tokens for which a near-tie was decided.

    A strategy is left out that fails, or in which nothing was decided.
    """

    def note(key: RunKey, result: JobResult) -> None:
        say(f"{key}: {'failed' if isinstance(result, UniparError) else 'done'}")

    shares = sorted({runs.strategies[name].sizes.ranks for name in strategies})
    replays = {runs.choices_key(count): count for count in shares}
    one = runs.one_process_config()
    found = worlds.run_jobs([[runs.replay_job(key, one) for key in replays]], note)
    files = {count: worlds.folder / f"choices-{count}.pt" for count in shares}
    for key, count in replays.items():
        if isinstance(result := found[key], UniparError):
            raise result
        write_recorded(result[0]["choices"], files[count])
    jobs = [runs.following_job(name, files[runs.strategies[name].sizes.ranks]) for name in strategies]
    for key, result in worlds.run_jobs(group_jobs_by_library(jobs), note).items():
        if not isinstance(result, UniparError):
            moved = {place: count for rank in result for place, count in rank["moved"].items()}
            if tokens := sum(moved.values()):
                yield key.strategy, combine_ranks(result), tokens
