"""`unipar jobs collect`: one scaling out of comparisons on several numbers of ranks, each of which was a job."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from unipar.backend.offered_strategies import config_in_strategy
from unipar.comparison import store
from unipar.comparison.compare import WORLDS_CSV, WORLDS_JSON, describe_comparison_errors
from unipar.config import Config, Strategy
from unipar.config.settled import SettledConfig
from unipar.errors import ReportError, UniparError
from unipar.report.build import try_write_page, write_html
from unipar.report.pages.scaling_page import render_scaling
from unipar.results.comparison import Comparison
from unipar.results.result_files import original_config_path, parse_comparison, read_mapping
from unipar.results.row import StrategyResult
from unipar.results.scaling import ScaledStrategy, Scaling
from unipar.run_folder.layout import PAGE_FILE_NAME
from unipar.utils.mappings import nested_mapping
from unipar.utils.text import count_of


def collect_worlds(out: Path) -> Scaling:
    """Return the scaling of the comparisons in OUT/worlds/world-N, and write its files and page to OUT/worlds."""
    folder = out / "worlds"
    by_ranks = {ranks: _read_world(at) for ranks, at in _world_folders(folder)}
    waiting = [str(ranks) for ranks, one in by_ranks.items() if one is None]
    ended = {ranks: one for ranks, one in by_ranks.items() if one is not None}
    if len(ended) < 2:
        raise ReportError(
            f"{folder} holds the results of {count_of(len(ended), 'number')} of ranks; a scaling needs two or more "
            "(`unipar jobs` tells how the jobs stand)"
        )
    worlds: list[ScaledStrategy] = []
    rows: list[StrategyResult] = []
    for strategy in dict.fromkeys(row.strategy for one, _, _ in ended.values() for row in one.rows[1:]):
        for ranks, (one, config, _) in ended.items():
            row = next((row for row in one.rows if row.strategy == strategy), None)
            if row is None:
                continue
            worlds.append(_world(config, strategy, ranks))
            rows.append(row.changed(strategy=worlds[-1].name))
    first, config, of = next(iter(ended.values()))
    now = Scaling(
        verb="compare",
        name=first.name,
        out=str(folder),
        precision=first.precision,
        unit=first.unit,
        worlds=tuple(worlds),
        rows=rows,
        cores=int(nested_mapping(of, "machine").get("cores", 0)),
        threads=str(of.get("threads", "")),
        device=config.device if config.device != "auto" else "cuda",
        warmup=first.warmup,
        held=config.train.local_steps is None,
        unwatched=first.unwatched,
        interrupted=any(one.interrupted for one, _, _ in ended.values()),
        wrong=tuple(
            f"{count_of(ranks, 'rank')}: {sentence}"
            for ranks, (one, _, _) in ended.items()
            for sentence in describe_comparison_errors(one)
        ),
        versions=nested_mapping(of, "versions"),
        machine=nested_mapping(of, "machine"),
        note=f"no result yet from {', '.join(waiting)} ranks" if waiting else "",
    ).mark_different_training()
    why = store.write_or_explain(folder, lambda: store.write_scaling(folder, WORLDS_JSON, WORLDS_CSV, now))
    page = try_write_page(lambda: write_html(render_scaling(now, folder), folder / PAGE_FILE_NAME))
    return now.changed(unkept=why, note="; ".join(filter(None, [now.note, page])))


def _world_folders(folder: Path) -> list[tuple[int, Path]]:
    """Return the folder of each number of ranks, ascending."""
    if not folder.is_dir():
        raise ReportError(f"{folder} does not exist; give the folder that `unipar submit scale` has named")
    named = [(re.fullmatch(r"world-(\d+)", path.name), path) for path in folder.iterdir()]
    return sorted((int(match[1]), path) for match, path in named if match)


def _read_world(at: Path) -> tuple[Comparison, Config, dict[str, Any]] | None:
    """Return a job's comparison, its config, and what it was made of; None if it has not ended."""
    file = at / "compare" / store.COMPARE_JSON
    if not file.exists():
        return None
    data = read_mapping(file, "comparison")
    one = parse_comparison(file, data)
    asked = read_mapping(original_config_path(file.parent, one.name), "config")
    return one, Config.model_validate(asked, strict=False), nested_mapping(data, "of")


def _world(config: Config, strategy: str, ranks: int) -> ScaledStrategy:
    """Return the strategy on this many ranks, with the sizes of its batch; zeros if it cannot be cut so."""
    sizes = {"samples": 0, "micro": 0, "accumulate": 0}
    try:
        at = Strategy.parse(strategy)
        cut = SettledConfig.of(config_in_strategy(config, at), at, ranks, "cpu").sizes
        sizes = {"samples": cut.total, "micro": cut.micro, "accumulate": cut.accumulate}
    except UniparError:
        pass
    return ScaledStrategy(strategy=strategy, ranks=ranks, kinds=("strong",), **sizes)
