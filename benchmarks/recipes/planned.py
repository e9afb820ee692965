"""Plan of each recipe on each of its numbers of GPUs, and of each published setting."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

import yaml

import unipar
from unipar.planning.plan import Plan
from unipar.planning.planned_strategy import PlannedStrategy
from unipar.planning.recommendation import recommend
from unipar.prediction.timeline import Category
from unipar.utils.text import parse_bytes

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RECIPES = ROOT / "configs" / "recipes"
MACHINE = "h100-sxm"
TUNING, PRETRAINING = (1, 4, 8, 16, 64), (64, 1024)
"""Numbers of GPUs."""

COLUMNS: dict[str, tuple[Category, ...]] = {
    "weights": ("parameters", "masters", "buffers"),
    "gradients": ("gradients",),
    "optimizer": ("optimizer",),
    "activations": ("activations",),
    "other": ("communication", "temporaries", "runtime"),
}
"""Categories in each column of the table."""


@final
@dataclass(frozen=True)
class PlannedRecipe:
    """A recipe on a number of GPUs: the recommended strategy, or the one that comes nearest."""

    recipe: str
    ranks: int
    strategy: str
    held: dict[str, int]
    """Bytes by column at the fullest moment."""

    peak: int
    seconds: float | None
    rate: float | None
    to_fit: str
    """Changes with which it would fit; empty if it does."""


def plan_recipe(file: Path) -> Iterator[PlannedRecipe]:
    """Yield a recipe's plan for each number of GPUs."""
    worlds = PRETRAINING if file.stem.startswith("pretrain") else TUNING
    plan = unipar.plan(file, worlds=worlds, machine=MACHINE)
    for each in recommend(plan.rows, plan.limit):
        row = each.row or _nearest(plan, each.ranks)
        held = {name: sum(row.peak.held.get(c, 0) for c in categories) for name, categories in COLUMNS.items()}
        speed = row.speed
        yield PlannedRecipe(
            file.stem,
            each.ranks,
            row.strategy,
            held,
            row.peak.peak,
            None if speed is None else speed.seconds,
            None if speed is None else speed.rate,
            "" if row.fits(plan.limit) else "; ".join(row.ways),
        )


def _nearest(plan: Plan, ranks: int) -> PlannedStrategy:
    """Return the strategy that needs the least."""
    rows = [row for row in plan.rows if row.ranks == ranks and not row.refusal]
    return min(rows, key=lambda row: row.least or row.needed)


@final
@dataclass(frozen=True)
class PublishedPeak:
    """Peak memory of a GPU that others measured."""

    name: str
    source: str
    setting: str
    peak: str
    measured: Literal["allocated", "reserved", "device"]
    set_aside: bool = False
    differences: str = ""
    """Differences between their setting and the planned one."""

    reason: str = ""
    """Why the plan is farther off than the limit, or why there is none."""

    plan: dict[str, Any] | None = None
    """The setting in words of a config; None: it has none."""

    @property
    def bytes(self) -> float:
        """The peak."""
        number, unit = self.peak.split()
        return parse_bytes(number + unit)

    def planned(self) -> int | None:
        """Return the planned peak; without what CUDA holds for itself, if PyTorch's memory was measured."""
        if self.plan is None:
            return None
        plan = unipar.plan(
            self._config(self.plan),
            strategies=[self.plan["strategy"]],
            worlds=[self.plan["ranks"]],
            memory="80GiB",
            device="cuda",
        )
        (row,) = plan.rows
        assert not row.refusal, row.refusal
        held = row.peak.held
        return row.peak.peak - (0 if self.measured == "device" else held.get("runtime", 0))

    def _config(self, wanted: dict[str, Any]) -> dict[str, Any]:
        model = yaml.safe_load((HERE / "models.yaml").read_text("utf-8"))[wanted["model"]]
        own = {key: wanted[key] for key in ("length", "lora", "targets", "chunks", "base") if key in wanted}
        micro, ranks = wanted.get("micro", 1), wanted["ranks"]
        return {
            "task": {"use": f"{ROOT}/examples/public_model.py:PublicModel", "args": {**model, **own}},
            "device": "cuda",
            "batch": {"total": micro * ranks * wanted.get("accumulate", 1), "micro": micro},
            "model": {"recompute": wanted.get("recompute", "none")},
            **({"options": {"native": {"vocabulary": wanted["vocabulary"]}}} if "vocabulary" in wanted else {}),
            "train": {"steps": 1, "precision": wanted["precision"], "optimizer": {"name": "adamw", "lr": 1.0e-5}},
        }


def published_peaks() -> Sequence[PublishedPeak]:
    """Return what others have published, in the order of the file."""
    return [PublishedPeak(**row) for row in yaml.safe_load((HERE / "published.yaml").read_text("utf-8"))]
