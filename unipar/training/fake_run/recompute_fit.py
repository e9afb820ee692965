"""`choose_recomputed`: as few blocks as the plan needs to stay within the memory of `model.recompute: {fit: ...}`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from unipar.backend.offered_strategies import strategy_of
from unipar.config import Config
from unipar.config.sections.model import RecomputeFit
from unipar.config.settled import SettledConfig
from unipar.errors import ConfigError, TaskError, Unsupported
from unipar.planning.cuda_total import runtime_terms
from unipar.prediction.request import PredictionRequest
from unipar.task import Task
from unipar.training.fake_run.token_traces import traces_of
from unipar.utils.text import count_of, format_size


@dataclass(frozen=True)
class RecomputeChoice:
    """Blocks that are recomputed, and what a rank needs by the plan."""

    names: tuple[str, ...]
    """Names of the blocks, the first of the model's."""

    of: int
    """Number of the model's blocks."""

    fit: int
    needed: int
    """Bytes of the fullest rank with these blocks recomputed."""

    unrecomputed: int
    """Bytes with none."""

    @property
    def says(self) -> str:
        """Sentence for the run log and `unipar explain`."""
        planned = f"{format_size(self.needed)} of {format_size(self.fit)} by the plan"
        if not self.names:
            return f"no block is recomputed: {planned}"
        which = self.names[0] if len(self.names) == 1 else f"{self.names[0]} to {self.names[-1]}"
        return (
            f"{len(self.names)} of {count_of(self.of, 'block')} are recomputed ({which}): {planned}, "
            f"{format_size(self.unrecomputed)} with none"
        )


def choose_recomputed(settled: SettledConfig, task: Task | None = None) -> RecomputeChoice:
    """Return as few blocks as need to be recomputed, the first ones: their backward runs when others' memory is freed.

    Raise ConfigError, with the numbers, if a plan is not possible or no number of blocks is enough.
    """
    config, fit = settled.config, settled.config.model.recompute
    assert isinstance(fit, RecomputeFit)
    blocks: list[str] = []

    def needed(count: int) -> int:
        """Return what the fullest rank needs if the first `count` blocks are recomputed; -1: all of them."""
        names = tuple(blocks[:count]) or "none" if count >= 0 else "blocks"
        request = _request_of(settled, config.changed({"model.recompute": names}))
        traces = traces_of(request.config, settled.sizes.micro, task)
        blocks[:] = traces.whole.timeline.blocks
        return traces.predict_needed(request)

    try:
        most = needed(0)
        if most <= fit.fit:
            return RecomputeChoice((), len(blocks), fit.fit, most, most)
        least = needed(-1)
        if least > fit.fit:
            raise _not_reached(settled, fit.fit, len(blocks), least, most)
        count, bytes_needed = find_fewest(needed, len(blocks), fit.fit, most, least)
    except (TaskError, Unsupported) as e:
        raise ConfigError(
            f"model.recompute: {{fit: {format_size(fit.fit)}}} chooses blocks by a plan, and there is none: {e}; say "
            "recompute: blocks, or none"
        ) from e
    return RecomputeChoice(tuple(blocks[:count]), len(blocks), fit.fit, bytes_needed, most)


def find_fewest(needed: Callable[[int], int], blocks: int, fit: int, most: int, least: int) -> tuple[int, int]:
    """Return the fewest of so many blocks with which `needed` is at most `fit`, and what is needed then.

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


def _request_of(settled: SettledConfig, config: Config) -> PredictionRequest:
    device = "cpu" if settled.device == "cpu" else "cuda"
    runtime = tuple(runtime_terms(settled.ranks)) if device == "cuda" else ()
    per_machine = config.ranks_of_machine(settled.ranks) or settled.ranks
    return PredictionRequest(config, settled.ranks, settled.sizes, device, per_machine, runtime)


def _not_reached(settled: SettledConfig, fit: int, blocks: int, least: int, most: int) -> ConfigError:
    config = settled.config
    ways: Sequence[str] = [
        *([f"lower batch.micro ({settled.sizes.micro})"] if settled.sizes.micro > 1 else []),
        *(["split parameters (parallel.shard: parameters)"] if config.parallel.shard != "parameters" else []),
        *(["move activations (model.offload: activations)"] if _may_offload(settled) else []),
        "raise fit",
    ]
    lack = f"{format_size(least)} by the plan, {format_size(least - fit)} more"
    return ConfigError(
        f"model.recompute: {{fit: {format_size(fit)}}} is not reached: with all of {count_of(blocks, 'block')} "
        f"recomputed a rank of {strategy_of(config)} needs {lack} ({format_size(most)} with none recomputed); "
        f"{', or '.join(filter(None, (', '.join(ways[:-1]), ways[-1])))}"
    )


def _may_offload(settled: SettledConfig) -> bool:
    return settled.device not in ("cpu", "mps") and not settled.config.model.offloads_activations
