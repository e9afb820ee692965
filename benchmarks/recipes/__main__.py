"""Plans of the recipes, and of peaks that others have published: the tables of docs/recipes.md.

    python -m benchmarks.recipes                write the tables: some minutes
    python -m benchmarks.recipes llama3_8b      print those with such a name

What was planned is kept in runs/recipes.jsonl until a recipe, a model or a row changes; --again plans anew. Exit 1: a
published peak is farther than the limit from its plan, and no reason is given.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

from benchmarks.recipes.planned import COLUMNS, HERE, RECIPES, ROOT, PlannedRecipe, PublishedPeak, plan_recipe
from benchmarks.recipes.planned import published_peaks as published
from unipar.utils.text import format_duration, format_rate

PAGE = ROOT / "docs" / "recipes.md"
STORE = Path("runs/recipes.jsonl")
LIMIT = 0.15
"""Largest distance of a plan from a published peak, as a share of it, that needs no reason."""


class Store:
    """Plans that are kept, by what they are of."""

    def __init__(self, *, again: bool) -> None:
        STORE.parent.mkdir(exist_ok=True)
        lines = STORE.read_text("utf-8").splitlines() if STORE.exists() and not again else []
        self._kept: dict[str, Any] = dict(map(json.loads, lines))
        STORE.write_text("".join(f"{line}\n" for line in lines), "utf-8")

    def get(self, given: str, make: Callable[[], Any]) -> Any:
        """Return what is made of this text, or was before."""
        key = sha256(given.encode()).hexdigest()
        if key not in self._kept:
            self._kept[key] = make()
            with STORE.open("a", encoding="utf-8") as file:
                file.write(f"{json.dumps([key, self._kept[key]])}\n")
        return self._kept[key]


def recipe_rows(store: Store, names: Sequence[str]) -> Iterator[PlannedRecipe]:
    """Yield each recipe on each number of GPUs."""
    task = (ROOT / "examples" / "public_model.py").read_text("utf-8")
    for file in sorted(RECIPES.glob("*.yaml")):
        if chosen(file.stem, names):

            def plan(file: Path = file) -> list[dict[str, Any]]:
                return [asdict(row) for row in plan_recipe(file)]

            for row in store.get(file.stem + file.read_text("utf-8") + task, plan):
                yield PlannedRecipe(**row)


def published_rows(store: Store, names: Sequence[str]) -> Iterator[tuple[PublishedPeak, int | None]]:
    """Yield each published peak, with the planned one."""
    models = (HERE / "models.yaml").read_text("utf-8")
    for row in published():
        if chosen(row.name, names):
            yield row, store.get(f"{row.name} {row.plan} {row.measured} {models}", row.planned)


def chosen(name: str, names: Sequence[str]) -> bool:
    """Return whether a name is wanted: all are if none is named."""
    return not names or any(each in name for each in names)


def recipe_table(rows: Sequence[PlannedRecipe]) -> str:
    """Return the table of recipes in Markdown."""
    heads = ["recipe", "GPUs", "strategy", *COLUMNS, "peak", "step", "tokens/s", "fits"]
    lines = [heads, ["---", "--:", "---", *["--:"] * len(COLUMNS), "--:", "--:", "--:", "---"]]
    for row in rows:
        speed = ["", ""]
        if row.seconds is not None and row.rate is not None:
            speed = [format_duration(row.seconds), format_rate(row.rate)]
        sizes = [gib(row.held[name]) for name in COLUMNS]
        lines.append([row.recipe, str(row.ranks), row.strategy, *sizes, gib(row.peak), *speed, row.to_fit or "yes"])
    return markdown(lines)


def published_table(rows: Sequence[tuple[PublishedPeak, int | None]]) -> str:
    """Return the table of published peaks in Markdown."""
    lines = [
        ["setting", "measured", "published", "planned", "difference", "set aside", "why it differs"],
        ["---", "---", "--:", "--:", "--:", "---", "---"],
    ]
    for row, planned in rows:
        found = ["", ""] if planned is None else [gib(planned), f"{planned / row.bytes - 1:+.1%}"]
        why = "; ".join(text for text in (row.reason, row.differences) if text)
        setting = f"[{row.name}]({row.source}): {row.setting}"
        lines.append([setting, row.measured, gib(row.bytes), *found, "yes" if row.set_aside else "", why])
    return markdown(lines)


def gib(count: float) -> str:
    """Return bytes in GiB."""
    return f"{count / 2**30:.1f}"


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """Return lines of cells as a table."""
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def far(row: PublishedPeak, planned: int | None) -> bool:
    """Return whether a plan needs a reason."""
    return planned is None or abs(planned / row.bytes - 1) > LIMIT


def write_tables(tables: dict[str, str]) -> None:
    """Put tables into the page, each between its marks."""
    text = PAGE.read_text("utf-8")
    for name, table in tables.items():
        text, count = re.subn(
            f"(<!-- {name} -->\n).*?(<!-- end -->)", lambda m, t=table: f"{m[1]}\n{t}\n{m[2]}", text, flags=re.DOTALL
        )
        assert count == 1, name
    PAGE.write_text(text, "utf-8")


def main() -> int:
    """Plan, and print or write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--again", action="store_true", help="plan anew what is kept")
    arguments = parser.parse_args()
    store = Store(again=arguments.again)
    recipes, peaks = list(recipe_rows(store, arguments.names)), list(published_rows(store, arguments.names))
    tables = {"recipes": recipe_table(recipes), "published": published_table(peaks)}
    if arguments.names:
        print("\n".join(tables.values()))
    else:
        write_tables(tables)
    missing = [row.name for row, planned in peaks if far(row, planned) and not row.reason]
    for name in missing:
        print(f"{name}: farther than {LIMIT:.0%} from its plan, and no reason is given", file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
