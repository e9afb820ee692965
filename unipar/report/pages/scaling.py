"""report.html of `unipar scale`: speed-up, efficiency and memory by the number of ranks."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unipar.memory.cuda_total import Measured, there
from unipar.report.charts.bars import SMALL, sizes
from unipar.report.charts.svg import Drawing, Scale, marks, wide
from unipar.report.data.comparison import config_of
from unipar.report.pages.elements import (
    again,
    e,
    figure,
    installed,
    keys_of,
    listed,
    located,
    said,
    section,
    tabled,
    together,
    whole,
)
from unipar.report.pages.memory_columns import assumptions, columns, meant, three
from unipar.results.files import asked_of
from unipar.results.memory_tables import fullest
from unipar.results.row import HEADS
from unipar.results.scaling import Kind, Scaling, World, percent
from unipar.utils.text import count_of, format_duration, format_size

NONE = "–"
COLOURS = 6
"""Lines of more cells begin with the first colour again, dashed."""


@dataclass(frozen=True)
class Shown:
    """What a figure is of."""

    label: str
    of: Callable[[World], float | None]
    words: Callable[[float], str]
    high: float
    ideal: Callable[[World], float] | None = None


def page(found: Scaling, folder: Path) -> str:
    """All of it; in `folder` lies what was asked."""
    problems: list[str] = []
    file = _asked(found, folder)
    config = config_of(file, problems) if file is not None else {}
    return whole(
        f"unipar {found.verb}: {found.name}",
        _head(found, problems),
        [*_figures(found), _worlds(found), _configs(config), _how(found, again(_command(found, folder, file)))],
    )


def _asked(found: Scaling, folder: Path) -> Path | None:
    """Its own config; of comparisons that of the smallest world, in which the others differ by their size alone."""
    smallest = min(world.ranks for world in found.worlds)
    files = [asked_of(at, found.name) for at in (folder, folder / f"world-{smallest}")]
    return next((file for file in files if file.exists()), None)


def _command(found: Scaling, folder: Path, file: Path | None) -> str:
    if file is None or folder.name not in ("scale", "worlds"):
        return ""
    sizes = ",".join(map(str, sorted({world.ranks for world in found.worlds})))
    cells = [word for cell in found.cells for word in ("--cell", cell)]
    words = ["unipar", found.verb, str(file), "--out", str(folder.parent), "--world", sizes, *cells, "--overwrite"]
    return shlex.join(words)


def _configs(config: Mapping[str, Any]) -> str:
    return section("configs", "Config", keys_of(config, "All keys of what was asked")) if config else ""


def answer(found: Scaling) -> str:
    """How near the widest worlds come to the ideal, the best cell first."""
    said: list[str] = []
    for kind in found.kinds:
        last = [worlds[-1] for cell in found.cells if len(worlds := found.of(cell, kind)) > 1]
        by = {world: share for world in last if (share := found.efficiency(world)) is not None}
        best = sorted(by, key=lambda world: -by[world])
        told = [f"{percent(by[world])} for {world.cell} on {count_of(world.ranks, 'rank')}" for world in best]
        said += [f"{kind} scaling: {', '.join(told)}"] if told else []
    return f"Of the ideal, {'; '.join(said)}." if said else "No cell ran in two worlds, so there is nothing to hold."


def _head(found: Scaling, problems: Sequence[str]) -> str:
    ranks = sorted({world.ranks for world in found.worlds})
    worlds = f"worlds of {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}" if len(ranks) > 1 else "one world"
    facts = [found.name, worlds, found.precision]
    right = all(a.within for _, a in found.agreements)
    kind, sign = ("open", "?") if not found.agreements else ("good", "✓") if right else ("bad", "✗")
    return "\n".join(
        [
            "<header>",
            f'<p class="kicker">unipar {found.verb} · {e(" · ".join(facts))}</p>',
            f"<h1>{e(together(answer(found)))}</h1>",
            *(f'<p class="badge {kind}"><b aria-hidden="true">{sign}</b> {e(line)}</p>' for line in found.verdict()),
            f'<p class="where">Measured on {e(located(found.machine, found.versions))}.</p>',
            *(said(text, "worry") for text in [f"On {found.shared()}.", *problems]),
            "</header>",
        ]
    )


def _key(found: Scaling) -> str:
    items = "".join(f'<li><i class="{_line(i)}"></i>{e(cell)}</li>' for i, cell in enumerate(found.cells))
    return f'<ul class="key">{items}</ul>'


def _line(i: int) -> str:
    return f"w{i % COLOURS}" + (" again" if i >= COLOURS else "")


def _figures(found: Scaling) -> Iterator[str]:
    def ideal(world: World) -> float:
        return world.ranks / found.base(world).ranks

    worlds = found.worlds
    faster = [v for w in worlds if (v := found.faster(w)) is not None]
    share = [v for w in worlds if (v := found.efficiency(w)) is not None]
    held = [v for w in worlds if (v := found.memory(w)) is not None]
    yield _section(
        found,
        Shown("Speed-up", found.faster, lambda v: f"{v:.2f}", max([*map(ideal, worlds), *faster]), ideal),
        "Samples a second in proportion to the smallest world. Dashed: the ideal, twice as much on twice the ranks.",
    )
    yield _section(
        found,
        Shown("Efficiency", found.efficiency, percent, max([1.0, *share]), lambda _: 1.0),
        "The speed-up in proportion to the ranks. Dashed: all of it.",
    )
    if held:
        yield _section(
            found,
            Shown("Memory", found.memory, format_size, max(held)),
            "What the fullest rank had allocated at its fullest moment, beyond what it held before training.",
        )


def _section(found: Scaling, shown: Shown, words: str) -> str:
    drawn = figure(lambda width: panels(found, shown, width), _table(found, shown))
    return section(shown.label.lower(), shown.label, said(words), _key(found), drawn)


def _how(found: Scaling, repeated: str) -> str:
    accounts = [(row.cell, fullest(row.memory)) for row in found.rows if row.memory]
    methods, notes = {a.method for _, a in accounts}, {f"{name}: {note}" for name, a in accounts for note in a.notes}
    return section(
        "how",
        "How it was measured",
        listed([*sorted(methods), *found.remarks(), *sorted(notes)]),
        assumptions() if accounts and not _measured(found) else "",
        installed(found.machine, found.versions),
        repeated,
    )


def _measured(found: Scaling) -> bool:
    """Whether no figure of CUDA is a prediction."""
    watched = [(row.memory, world.ranks) for world in found.worlds if (row := found.row(world)).memory]
    return all(isinstance(there(fullest(accounts), ranks), Measured) for accounts, ranks in watched)


def _worlds(found: Scaling) -> str:
    head = [
        "cell",
        "scaling",
        "ranks",
        "samples a step",
        "a rank",
        "median step",
        "samples/s",
        "speed-up",
        "efficiency",
    ]
    cuda = any(a.on is not None for row in found.rows for a in row.memory)
    memory = ["cell", "scaling", "ranks", *columns(cuda=cuda, measured=_measured(found))]
    rows: list[list[str]] = []
    held: list[list[str]] = []
    for world in found.worlds:
        row, rate = found.row(world), found.rate(world)
        share = f"{world.micro} × {world.accumulate}"
        start = [world.cell, " and ".join(world.kinds), str(world.ranks), str(world.samples), share]
        if rate is None:
            rows.append([*start, HEADS.get(row.outcome, "") + (row.note or row.outcome)])
            continue
        faster, efficient = found.faster(world), found.efficiency(world)
        told = [NONE if faster is None else f"{faster:.2f}", NONE if efficient is None else percent(efficient)]
        held.append([*start[:3], *three(row, world.ranks)])
        rows.append([*start, format_duration(world.samples / rate), f"{rate:.1f}", *told])
    return section(
        "worlds",
        "Every world",
        tabled(head, rows, "What each world took", (0, 1)),
        tabled(memory, held, "Memory of its largest rank", (0, 1)),
        meant(cuda=cuda, measured=_measured(found)),
    )


def _table(found: Scaling, shown: Shown) -> str:
    ranks = sorted({world.ranks for world in found.worlds})
    rows: list[list[str]] = []
    for cell in found.cells:
        for kind in found.kinds:
            by = {world.ranks: shown.of(world) for world in found.of(cell, kind)}
            rows.append([cell, kind, *(NONE if (v := by.get(n)) is None else shown.words(v) for n in ranks)])
    return tabled(["cell", "scaling", *(count_of(n, "rank") for n in ranks)], rows, f"{shown.label} by ranks", (0, 1))


def panels(found: Scaling, shown: Shown, width: int) -> str:
    """Strong scaling at the left, weak at the right; below it where it is narrow. A line a cell."""
    across, tall, gap = (1, 190, 56) if width < SMALL or len(found.kinds) == 1 else (2, 230, 56)
    at = sizes(shown.high) if shown.ideal is None else [(v, shown.words(v)) for v in marks(0, shown.high, 4)]
    left = max(wide(words) for _, words in at) + 12
    each = (width - across * left - 20) / across
    drawing = Drawing(width, (tall + gap) * (len(found.kinds) // across), f"{shown.label} by ranks")
    ranks = sorted({world.ranks for world in found.worlds})
    for i, kind in enumerate(found.kinds):
        start, top = left + (i % across) * (each + left + 10), 26 + (i // across) * (tall + gap)
        x = Scale(ranks[0], max(ranks[-1], ranks[0] + 1), start, start + each)
        y = Scale(0, shown.high * 1.04, top + tall, top)
        drawing.text(start, top - 10, f"{kind} scaling, by ranks", "name")
        for value, words in at:
            drawing.line((x.start, y(value)), (x.end, y(value)), "grid")
            drawing.text(start - 6, y(value) + 4, words, "tick", "end")
        free = 0.0
        for n in ranks:
            half = wide(str(n)) / 2
            if x(n) - half >= free:
                drawing.text(x(n), top + tall + 18, str(n), "tick", "middle")
                free = x(n) + half + 8
        _lines(drawing, found, shown, kind, x, y)
    return str(drawing)


def _lines(drawing: Drawing, found: Scaling, shown: Shown, kind: Kind, x: Scale, y: Scale) -> None:
    own = [[w for w in found.worlds if w.cell == cell and kind in w.kinds] for cell in found.cells]
    if shown.ideal is not None:
        drawing.way([(x(w.ranks), y(shown.ideal(w))) for w in max(own, key=len)], "ideal")
    for i, cell in enumerate(found.cells):
        points = [(w, v) for w in found.of(cell, kind) if (v := shown.of(w)) is not None]
        drawing.way([(x(w.ranks), y(v)) for w, v in points], f"way {_line(i)}")
        for w, v in points:
            tip = f"{cell}, {count_of(w.ranks, 'rank')}: {shown.words(v)}"
            drawing.dot((x(w.ranks), y(v)), 4, f"at {_line(i)}", tip)
