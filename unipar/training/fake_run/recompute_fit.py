"""`choose_recomputed`: as few blocks as the plan needs to stay within the memory of `model.recompute: {fit: ...}`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import final

from unipar.backend.offered_strategies import strategy_of
from unipar.config import Config
from unipar.config.sections.model import RecomputeFit
from unipar.config.settled import SettledConfig
from unipar.errors import ConfigError, TaskError, Unsupported
from unipar.planning.cuda_total import runtime_terms
from unipar.planning.recompute_choice import Recompute, RecomputeChoice
from unipar.prediction.request import PredictionRequest
from unipar.task import Task
from unipar.training.fake_run.task_traces import TaskTraces
from unipar.training.fake_run.token_traces import TokenTraces, traces_of
from unipar.utils.text import count_of, format_size


@final
class RecomputeTraces:
    """Fake steps of a config's task with more or fewer blocks recomputed, of which each is traced once."""

    def __init__(self, config: Config, micro: int, task: Task | None = None) -> None:
        """`task`: None for the config's own."""
        self._config, self._micro, self._task = config, micro, task
        self._traces: dict[Recompute, TaskTraces | TokenTraces] = {}

    def of(self, recompute: Recompute) -> TaskTraces | TokenTraces:
        """Return the fake steps with these blocks recomputed."""
        if recompute not in self._traces:
            config = self._config.changed({"model.recompute": recompute})
            self._traces[recompute] = traces_of(config, self._micro, self._task)
        return self._traces[recompute]

    @property
    def blocks(self) -> tuple[str, ...]:
        """Names of the model's blocks."""
        return self.of("blocks").whole.timeline.blocks


def trace_all(
    config: Config, micro: int, task: Task | None = None
) -> tuple[TaskTraces | TokenTraces, RecomputeTraces | None]:
    """Return a config's fake steps, and under `fit`, with all blocks recomputed, those among which it chooses."""
    if not isinstance(config.model.recompute, RecomputeFit):
        return traces_of(config, micro, task), None
    recompute = RecomputeTraces(config, micro, task)
    return recompute.of("blocks"), recompute


def choose_recomputed(request: PredictionRequest, traces: RecomputeTraces) -> RecomputeChoice:
    """Return as few blocks as need to be recomputed, the first ones: their backward runs when others' memory is freed.

    Raise ConfigError, with the numbers, if a plan is not possible or no number of blocks is enough.
    """
    fit = request.config.model.recompute
    assert isinstance(fit, RecomputeFit)

    def needed(count: int) -> int:
        """Return what the fullest rank needs if `count` blocks are recomputed."""
        recompute: Recompute = "none" if not count else "blocks" if count == len(blocks) else blocks[:count]
        config = request.config.changed({"model.recompute": recompute})
        return traces.of(recompute).predict_needed(replace(request, config=config))

    try:
        blocks = traces.blocks
        most = needed(0)
        if most <= fit.fit:
            return RecomputeChoice((), len(blocks), fit.fit, most, most)
        least = needed(len(blocks))
        if least > fit.fit:
            raise _not_reached(request, fit.fit, len(blocks), least, most)
        count, bytes_needed = find_fewest(needed, len(blocks), fit.fit, most, least)
    except (TaskError, Unsupported) as e:
        raise ConfigError(
            f"model.recompute: {{fit: {format_size(fit.fit)}}} chooses blocks by a plan, and there is none: {e}; say "
            "recompute: blocks, or none"
        ) from e
    return RecomputeChoice(blocks[:count], len(blocks), fit.fit, bytes_needed, most)


def choose_for_run(settled: SettledConfig, task: Task | None = None) -> RecomputeChoice:
    """Return the blocks that a run recomputes; raise ConfigError if no number of them is enough."""
    config, ranks = settled.config, settled.ranks
    device = "cpu" if settled.device == "cpu" else "cuda"
    runtime = tuple(runtime_terms(ranks)) if device == "cuda" else ()
    per_machine = config.ranks_of_machine(ranks) or ranks
    request = PredictionRequest(config, ranks, settled.sizes, device, per_machine, runtime)
    return choose_recomputed(request, RecomputeTraces(config, settled.sizes.micro, task))


def find_fewest(needed: Callable[[int], int], blocks: int, fit: int, most: int, least: int) -> tuple[int, int]:
    """Return the fewest of `blocks` with which `needed` is at most `fit`, and what is needed then.

    `most`, `least`: what is needed with none, which does not fit, and with all, which fits. Bytes go nearly along a
    line, by which the next number to try is guessed.
    """
    low, high = (0, most), (blocks, least)
    while high[0] - low[0] > 1:
        share = (low[1] - fit) / max(1, low[1] - high[1])
        guess = low[0] + max(1, min(high[0] - low[0] - 1, round(share * (high[0] - low[0]) + 0.5)))
        now = guess, needed(guess)
        low, high = (low, now) if now[1] <= fit else (now, high)
    return high


def _not_reached(request: PredictionRequest, fit: int, blocks: int, least: int, most: int) -> ConfigError:
    config = request.config
    may_offload = request.device != "cpu" and not config.model.offloads_activations
    ways: Sequence[str] = [
        *([f"lower batch.micro ({request.sizes.micro})"] if request.sizes.micro > 1 else []),
        *(["split parameters (parallel.shard: parameters)"] if config.parallel.shard != "parameters" else []),
        *(["move activations (model.offload: activations)"] if may_offload else []),
        "raise fit",
    ]
    lack = f"{format_size(least)} by the plan, {format_size(least - fit)} more"
    return ConfigError(
        f"model.recompute: {{fit: {format_size(fit)}}} is not reached: with all of {count_of(blocks, 'block')} "
        f"recomputed a rank of {strategy_of(config)} needs {lack} ({format_size(most)} with none recomputed); "
        f"{', or '.join(filter(None, (', '.join(ways[:-1]), ways[-1])))}"
    )
