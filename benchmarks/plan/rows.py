"""Rows of the comparison of plan and measurement: all that can run, and a covering set of them."""

from __future__ import annotations

import random
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import combinations, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.memory import SIZES
from benchmarks.plan.models import PUBLIC_MODELS
from unipar.backend import checks
from unipar.backend import offered_strategies as strategies
from unipar.config import Config, Strategy
from unipar.config.config_source import load_given_config
from unipar.errors import UniparError
from unipar.prediction.request import PredictionRequest

if TYPE_CHECKING:
    from unipar.training.fake_run.task_traces import PredictedStep

ROOT = Path(__file__).parents[2]
CONTEXT = 64

OF_OURS: dict[str, Sequence[Any]] = {
    "model": tuple(SIZES),
    "precision": ("fp32", "bf16-mixed", "bf16-master"),
    "ranks": (1, 2, 4),
    "micro": (2, 8),
    "recompute": ("none", "blocks"),
    "accumulate": (1, 2),
}
"""Values of each setting of the character GPT's rows; strategies come to them."""

OF_PUBLIC: dict[str, Sequence[Any]] = {
    "model": tuple(PUBLIC_MODELS),
    "precision": ("fp32", "bf16-mixed"),
    "ranks": (1, 2),
    "micro": (4,),
    "recompute": ("none",),
    "accumulate": (1,),
}
MESH_STRATEGIES = (
    "native/nothing+tensor2",
    "native/parameters+tensor2",
    "native/nothing+tensor2+sequence",
    "native/nothing+pipeline2",
    "native/parameters+pipeline2",
    "native/parameters+context2",
    "accelerate/nothing+tensor2",
    "accelerate/gradients+tensor2",
    "accelerate/parameters+tensor2",
    "accelerate/gradients+context2",
    "accelerate/parameters+context2",
    "deepspeed/nothing+tensor2",
    "deepspeed/optimizer+tensor2",
    "deepspeed/gradients+tensor2",
    "deepspeed/parameters+tensor2",
)
SEED = 16


@dataclass(frozen=True, order=True)
class Row:
    """One training to be planned and measured."""

    model: str
    strategy: str
    precision: str
    ranks: int
    micro: int
    recompute: str
    accumulate: int
    compile: str = "none"
    """none, blocks or model."""

    @property
    def words(self) -> tuple[str, ...]:
        """The row's first columns."""
        more = f"x{self.accumulate}" if self.accumulate > 1 else ""
        changed = ["recomputed"] * (self.recompute != "none") + [f"compiled {self.compile}"] * (self.compile != "none")
        return self.model, self.precision, str(self.ranks), f"{self.micro}{more}", ", ".join(changed), self.strategy

    @property
    def pairs(self) -> frozenset[tuple[Any, ...]]:
        """Each two of its settings with their values."""
        return frozenset(combinations(asdict(self).items(), 2))


def predict_strategy(config: Config, strategy: Strategy, ranks: int) -> PredictedStep:
    """Return what a strategy needs on the CPU, for a config that is in it; raise Unsupported if it is not planned."""
    from unipar.training.fake_run.token_traces import traces_of

    sizes = config.batch.settle(ranks // strategy.axes.ranks)
    return traces_of(config, sizes.micro).predict(PredictionRequest(config, ranks, sizes, "cpu", ranks))


def config_of(row: Row) -> Config:
    """Return a row's config in its strategy; raise a UniparError if the strategy cannot run it."""
    strategy = Strategy.parse(row.strategy)
    data = row.ranks // strategy.axes.ranks
    if data * strategy.axes.ranks != row.ranks:
        raise UniparError(f"{row.strategy} has no part for {row.ranks} ranks")
    if row.model in PUBLIC_MODELS:
        name = "ImageModel" if row.model == "resnet" else "TextModel"
        task = {"use": f"{ROOT}/benchmarks/plan/models.py:{name}", "args": PUBLIC_MODELS[row.model]}
    else:
        task = {"use": f"{ROOT}/examples/char_gpt.py:CharGPT", "args": _size_of(row.model)}
    settings: dict[str, Any] = {
        "task": task,
        "device": "cpu",
        "parallel": {"data": row.ranks},  # of which a strategy with axes leaves fewer for the data
        "batch": {"total": row.micro * row.accumulate * data, "micro": row.micro},
        "model": {"recompute": row.recompute, "compile": False if row.compile == "none" else row.compile},
        "train": {"steps": 10, "precision": row.precision, "optimizer": {"lr": 3e-4}},
    }
    config = strategies.config_in_strategy(load_given_config(settings, None).config, strategy)
    checks.check_can_run(config)
    return config


def _size_of(model: str) -> dict[str, int]:
    """Return the character GPT's arguments by a name of SIZES, or by "3 layers, width 128, 4 heads, context 64"."""
    if model in SIZES:
        return {**SIZES[model], "context": CONTEXT}
    layers, width, heads, context = map(int, re.findall(r"\d+", model))
    return {"layers": layers, "width": width, "heads": heads, "context": context}


@cache
def all_strategies() -> tuple[str, ...]:
    """Return the strategies that can run on the CPU."""
    plain = (str(strategy) for strategy in strategies.expand_strategy_patterns(("*",)))
    return (*(strategy for strategy in plain if strategy != "native/nothing+dp"), *MESH_STRATEGIES)


def rows_of(settings: Mapping[str, Sequence[Any]], wanted: Sequence[str] = ()) -> list[Row]:
    """Return all rows with these values that can run, in strategies `wanted`, or in all."""
    found: list[Row] = []
    for values in product(*settings.values()):
        for strategy in wanted or all_strategies():
            row = Row(**dict(zip(settings, values, strict=True)), strategy=strategy)
            alone = strategy == "single"
            if alone != (row.ranks == 1) and (alone or Strategy.parse(strategy).axes.ranks > 1):
                continue
            if _can_run(row):
                found.append(row)
    return found


def _can_run(row: Row) -> bool:
    try:
        config_of(row)
    except UniparError:
        return False
    return True


def covering_rows(rows: Iterable[Row], least: int, rather: Collection[Row] = ()) -> list[Row]:
    """Return rows in which each pair of values that can run comes at least once, and `least` of them.

    `rather`: those to be taken among equally good ones.
    """
    left = sorted(rows)
    random.Random(SEED).shuffle(left)
    left.sort(key=lambda row: row not in rather)
    missing = set[tuple[Any, ...]]().union(*(row.pairs for row in left))
    chosen: list[Row] = []
    while missing:
        best = max(left, key=lambda row: len(row.pairs & missing))
        chosen.append(best)
        left.remove(best)
        missing -= best.pairs
    return chosen + left[: max(0, least - len(chosen))]
