"""report.html of a scaling: speed-up, efficiency and memory by the number of ranks."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from unipar.planning.cuda_total import MeasuredCudaMemory, total_on_cuda
from unipar.report.charts.bars import NARROW_BELOW_PIXELS, byte_ticks
from unipar.report.charts.svg import AxisScale, Drawing, line_class, round_ticks, text_width
from unipar.report.data.comparison_data import read_config_keys
from unipar.report.html.elements import (
    Badge,
    BadgeKind,
    bullet_list,
    colour_key,
    config_listing,
    describe_machine,
    environment_tables,
    html_figure,
    html_page,
    html_section,
    html_table,
    page_header,
    paragraph,
    repeat_command_block,
)
from unipar.report.pages.memory.columns import column_notes, cuda_assumptions, memory_column_heads, memory_strategies
from unipar.report.pages.step_work import step_work_section
from unipar.results.memory_tables import largest_account
from unipar.results.result_files import original_config_path
from unipar.results.row import OUTCOME_PREFIXES
from unipar.results.scaling import ScaledStrategy, Scaling, ScalingKind, format_percent
from unipar.utils.text import count_of, format_duration, format_size

_NO_VALUE = "–"


@dataclass(frozen=True)
class ScalingFigure:
    """Quantity that a figure shows, with its format and its ideal line."""

    label: str
    value_of: Callable[[ScaledStrategy], float | None]
    format_value: Callable[[float], str]
    high: float
    ideal: Callable[[ScaledStrategy], float] | None = None


def render_scaling(scaling: Scaling, folder: Path) -> str:
    """Return the page; `folder` holds the scaling's file and the config that was given."""
    problems: list[str] = []
    file = _find_config_file(scaling, folder)
    config = read_config_keys(file, problems) if file is not None else {}
    return html_page(
        f"unipar {scaling.verb}: {scaling.name}",
        _head(scaling, problems),
        [
            *_figure_sections(scaling),
            _worlds(scaling),
            _work(scaling),
            _configs(config),
            _method_section(scaling, repeat_command_block(_command_to_repeat(scaling, folder, file))),
        ],
    )


def _find_config_file(scaling: Scaling, folder: Path) -> Path | None:
    """Return the file of the config that was given, in `folder` or in that of the smallest world."""
    smallest = min(world.ranks for world in scaling.worlds)
    files = [original_config_path(at, scaling.name) for at in (folder, folder / f"world-{smallest}")]
    return next((file for file in files if file.exists()), None)


def _command_to_repeat(scaling: Scaling, folder: Path, file: Path | None) -> str:
    if file is None or folder.name not in ("scale", "worlds"):
        return ""
    sizes = ",".join(map(str, sorted({world.ranks for world in scaling.worlds})))
    strategies = [word for strategy in scaling.strategies for word in ("--strategy", strategy)]
    words = [
        "unipar",
        scaling.verb,
        str(file),
        "--out",
        str(folder.parent),
        "--world",
        sizes,
        *strategies,
        "--overwrite",
    ]
    return shlex.join(words)


def _configs(config: Mapping[str, Any]) -> str:
    return html_section("configs", "Config", config_listing(config, "All keys of the given config")) if config else ""


def _head(scaling: Scaling, problems: Sequence[str]) -> str:
    ranks = sorted({world.ranks for world in scaling.worlds})
    worlds = f"worlds of {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}" if len(ranks) > 1 else "one world"
    facts = [scaling.name, worlds, scaling.precision]
    right = all(a.within for _, a in scaling.agreements)
    kind: BadgeKind = "open" if not scaling.agreements else "good" if right else "bad"
    return page_header(
        [f"unipar {scaling.verb}", *facts],
        f"{scaling.summary}.",
        badges=[Badge(kind, line) for line in scaling.verdict()],
        where=f"Measured on {describe_machine(scaling.machine, scaling.versions)}.",
        worries=[f"On {scaling.shared()}.", *problems],
    )


def _figure_sections(scaling: Scaling) -> Iterator[str]:
    def ideal(world: ScaledStrategy) -> float:
        return world.ranks / scaling.base(world).ranks

    worlds = scaling.worlds
    faster = [v for w in worlds if (v := scaling.speed_up(w)) is not None]
    share = [v for w in worlds if (v := scaling.efficiency(w)) is not None]
    memory = [v for w in worlds if (v := scaling.memory(w)) is not None]
    yield _figure_section(
        scaling,
        ScalingFigure("Speed-up", scaling.speed_up, lambda v: f"{v:.2f}", max([*map(ideal, worlds), *faster]), ideal),
        f"{scaling.unit.capitalize()} a second, relative to the smallest world. Dashed: the ideal, twice the speed on "
        "twice the ranks.",
    )
    yield _figure_section(
        scaling,
        ScalingFigure("Efficiency", scaling.efficiency, format_percent, max([1.0, *share]), lambda _: 1.0),
        "Speed-up as a part of the ideal speed-up. Dashed: the ideal, 100 %.",
    )
    if memory:
        yield _figure_section(
            scaling,
            ScalingFigure("Memory", scaling.memory, format_size, max(memory)),
            "Peak of the memory that the fullest rank allocated, beyond what it held before training.",
        )


def _figure_section(scaling: Scaling, shown: ScalingFigure, words: str) -> str:
    key = colour_key((line_class(i), strategy) for i, strategy in enumerate(scaling.strategies))
    drawn = html_figure(lambda width: draw_scaling_panels(scaling, shown, width), _table(scaling, shown))
    return html_section(shown.label.lower(), shown.label, paragraph(words), key, drawn)


def _method_section(scaling: Scaling, repeated: str) -> str:
    accounts = [(row.strategy, largest_account(row.memory)) for row in scaling.rows if row.memory]
    methods, notes = {a.method for _, a in accounts}, {f"{name}: {note}" for name, a in accounts for note in a.notes}
    return html_section(
        "how",
        "How it was measured",
        bullet_list([*sorted(methods), *scaling.remarks(work=False), *sorted(notes)]),
        cuda_assumptions() if accounts and not _is_all_measured(scaling) else "",
        environment_tables(scaling.machine, scaling.versions),
        repeated,
    )


def _is_all_measured(scaling: Scaling) -> bool:
    """Return whether every figure for CUDA was measured."""
    measured = [(row.memory, world.ranks) for world in scaling.worlds if (row := scaling.row(world)).memory]
    return all(
        isinstance(total_on_cuda(largest_account(accounts), ranks), MeasuredCudaMemory) for accounts, ranks in measured
    )


def _worlds(scaling: Scaling) -> str:
    head = [
        "strategy",
        "scaling",
        "ranks",
        f"{scaling.unit} a step",
        "on a rank",
        "median step",
        f"{scaling.unit}/s",
        "speed-up",
        "efficiency",
    ]
    cuda = any(a.on is not None for row in scaling.rows for a in row.memory)
    memory = ["strategy", "scaling", "ranks", *memory_column_heads(cuda=cuda, measured=_is_all_measured(scaling))]
    rows: list[list[str]] = []
    memory_rows: list[list[str]] = []
    for world in scaling.worlds:
        row, rate = scaling.row(world), scaling.rate(world)
        share = f"{world.micro} × {world.accumulate}" if world.samples else _NO_VALUE
        if world.samples and scaling.unit == "tokens":  # in microbatches whose number varies
            share = str(world.data_rank)
        samples = str(world.samples or _NO_VALUE)
        start = [world.strategy, " and ".join(world.kinds), str(world.ranks), samples, share]
        if rate is None:
            rows.append([*start, OUTCOME_PREFIXES.get(row.outcome, "") + (row.note or row.outcome)])
            continue
        faster, efficient = scaling.speed_up(world), scaling.efficiency(world)
        ratios = [
            _NO_VALUE if faster is None else f"{faster:.2f}",
            _NO_VALUE if efficient is None else format_percent(efficient),
        ]
        memory_rows.append([*start[:3], *memory_strategies(row, world.ranks)])
        rows.append([*start, format_duration(median(row.timed_seconds)), f"{rate:.1f}", *ratios])
    return html_section(
        "worlds",
        "Every world",
        html_table(head, rows, "Time of each world", (0, 1)),
        html_table(memory, memory_rows, "Memory of its largest rank", (0, 1)),
        column_notes(cuda=cuda, measured=_is_all_measured(scaling)),
    )


def _work(scaling: Scaling) -> str:
    names = {w.name: [w.strategy, " and ".join(w.kinds), str(w.ranks)] for w in scaling.worlds}
    return step_work_section(scaling, ["strategy", "scaling", "ranks"], names, (0, 1))


def _table(scaling: Scaling, shown: ScalingFigure) -> str:
    ranks = sorted({world.ranks for world in scaling.worlds})
    rows: list[list[str]] = []
    for strategy in scaling.strategies:
        for kind in scaling.kinds:
            by = {world.ranks: shown.value_of(world) for world in scaling.timed_worlds(strategy, kind)}
            rows.append(
                [strategy, kind, *(_NO_VALUE if (v := by.get(n)) is None else shown.format_value(v) for n in ranks)]
            )
    return html_table(
        ["strategy", "scaling", *(count_of(n, "rank") for n in ranks)], rows, f"{shown.label} by ranks", (0, 1)
    )


def draw_scaling_panels(scaling: Scaling, shown: ScalingFigure, width: int) -> str:
    """Draw a line per strategy, strong and weak scaling side by side, or one below the other if `width` is small."""
    across, tall, gap = (1, 190, 56) if width < NARROW_BELOW_PIXELS or len(scaling.kinds) == 1 else (2, 230, 56)
    at = (
        byte_ticks(shown.high)
        if shown.ideal is None
        else [(v, shown.format_value(v)) for v in round_ticks(0, shown.high, 4)]
    )
    left = max(text_width(words) for _, words in at) + 12
    each = (width - across * left - 20) / across
    drawing = Drawing(width, (tall + gap) * (len(scaling.kinds) // across), f"{shown.label} by ranks")
    ranks = sorted({world.ranks for world in scaling.worlds})
    for i, kind in enumerate(scaling.kinds):
        start, top = left + (i % across) * (each + left + 10), 26 + (i // across) * (tall + gap)
        x = AxisScale(ranks[0], max(ranks[-1], ranks[0] + 1), start, start + each)
        y = AxisScale(0, shown.high * 1.04, top + tall, top)
        drawing.text(start, top - 10, f"{kind} scaling, by ranks", "name")
        for value, words in at:
            drawing.line((x.start, y(value)), (x.end, y(value)), "grid")
            drawing.text(start - 6, y(value) + 4, words, "tick", "end")
        free = 0.0
        for n in ranks:
            half = text_width(str(n)) / 2
            if x(n) - half >= free:
                drawing.text(x(n), top + tall + 18, str(n), "tick", "middle")
                free = x(n) + half + 8
        _lines(drawing, scaling, shown, kind, x, y)
    return str(drawing)


def _lines(
    drawing: Drawing, scaling: Scaling, shown: ScalingFigure, kind: ScalingKind, x: AxisScale, y: AxisScale
) -> None:
    own = [[w for w in scaling.worlds if w.strategy == strategy and kind in w.kinds] for strategy in scaling.strategies]
    if shown.ideal is not None:
        drawing.polyline([(x(w.ranks), y(shown.ideal(w))) for w in max(own, key=len)], "ideal")
    for i, strategy in enumerate(scaling.strategies):
        points = [(w, v) for w in scaling.timed_worlds(strategy, kind) if (v := shown.value_of(w)) is not None]
        drawing.polyline([(x(w.ranks), y(v)) for w, v in points], f"way {line_class(i)}")
        for w, v in points:
            tip = f"{strategy}, {count_of(w.ranks, 'rank')}: {shown.format_value(v)}"
            drawing.dot((x(w.ranks), y(v)), 4, f"at {line_class(i)}", tip)
