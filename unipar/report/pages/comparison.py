"""report.html: one page that needs nothing else, no network and no script."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from statistics import median

from unipar.backend import Category
from unipar.memory.account import CATEGORIES, PHASES
from unipar.memory.cuda_total import Predicted, there
from unipar.report.charts.bars import balance, bridge, cut_short, stacked, times
from unipar.report.charts.lines import SHADES, differences, drawable, losses, pareto, parted, through
from unipar.report.data import changes
from unipar.report.data.comparison import Seen, Told
from unipar.report.data.headline import WORDS, answer, base_of, halves, moves, ranked
from unipar.report.pages.devices import device
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
from unipar.report.pages.failed_cells import till
from unipar.report.pages.library_defaults import own
from unipar.report.pages.memory_columns import assumptions, columns, meant, three
from unipar.results.agreement import tolerance
from unipar.results.files import asked_of
from unipar.results.memory_tables import fullest, settled
from unipar.results.row import HEADS
from unipar.utils.text import count_of, format_duration, format_size

NONE = "–"


def page(told: Told, before: Told | None = None) -> str:
    """All of it; with `before`, an earlier comparison laid below this one."""
    apart = changes.unlike(before, told) if before is not None else []
    before = changes.laid(before, told) if before is not None else None
    sections = [
        _memory(told, before),
        _cells(told),
        till(told),
        device(told),
        _changed(told, before),
        _bridges(told),
        _through(told, before),
        _balance(told),
        _losses(told),
        _pareto(told, before),
        _times(told, before),
        _sent(told),
        _configs(told),
        _how(told),
    ]
    return whole(f"unipar compare: {told.found.name}", _head(told, before, apart), sections)


def _head(told: Told, before: Told | None, apart: Sequence[str]) -> str:
    found = told.found
    facts = [count_of(found.ranks, "rank")] if found.ranks else []
    facts += [found.precision, f"{count_of(found.samples, 'sample')} a step"]
    facts += [f"{told.parameters:,} parameters"] if told.parameters else []
    sure = found.reference is not None and any(found.agreement(row) is not None for row in found.rows)
    kind, sign = ("bad", "✗") if found.disagree else ("good", "✓") if sure else ("open", "?")
    first = found.verdict()
    worries = [*told.problems, *(before.problems if before is not None else ())]
    return "\n".join(
        [
            "<header>",
            f'<p class="kicker">unipar compare · {e(found.name)} · {e(" · ".join(facts))}</p>',
            f"<h1>{e(together(answer(told)))}</h1>",
            *(said(text, "worry") for text in apart),
            *([said(changes.sentence(before, told), "since")] if before is not None else []),
            *(f'<p class="badge {kind}"><b aria-hidden="true">{sign}</b> {e(line)}</p>' for line in first[:1]),
            *(
                f'<p class="badge bad"><b aria-hidden="true">{sign}</b> {e(line)}</p>'
                for line in first[1:]
                if kind == "bad"
            ),
            f'<p class="where">Measured on {e(where(told))}.</p>',
            *(f'<p class="worry">{e(worry)}</p>' for worry in worries),
            "</header>",
        ]
    )


def where(told: Told) -> str:
    """The machine, in words."""
    devices = sorted({a.device.upper() if a.on is None else a.on.name for c in told.cells for a in c.memory})
    return located(told.machine, told.versions, [f"memory counted on the {' and '.join(devices)}"] if devices else ())


def _key(told: Told) -> str:
    """The colours, in the order in which they are drawn."""
    items = "".join(f'<li><i class="c-{c}"></i>{e(WORDS[c])}</li>' for c in _held(told))
    return f'<ul class="key">{items}</ul>'


def _held(told: Told) -> list[Category]:
    """Those that any cell holds at its peak."""
    held = {c for cell in told.measured if cell.fullest is not None for c in cell.fullest.peak.held}
    return [c for c in CATEGORIES if c in held]


def _memory(told: Told, before: Told | None) -> str:
    title = "Memory at the peak"
    if not told.measured:
        return section(
            "memory", title, said("Memory was not measured in this comparison: no cell has an account of it.")
        )
    missing = [c.cell for c in told.cells if c.row.outcome == "ran" and c.fullest is None]
    shown: list[Category] = [
        c for c in CATEGORIES if any(c in cell.fullest.peak.held for cell in told.measured if cell.fullest)
    ]
    rows: list[list[str]] = []
    for cell in told.measured:
        assert cell.fullest is not None
        peak = cell.fullest.peak
        parts = [format_size(peak.held[c]) if c in peak.held else NONE for c in shown]
        rows.append([cell.cell, peak.name, format_size(peak.peak), *parts])
    cut = [f"{c.cell} holds {format_size(c.peak)}" for c in told.measured if c.cell in cut_short(told, before)[1]]
    table = tabled(["cell", "phase", "peak", *(WORDS[c] for c in shown)], rows, "Bytes by category at the peak", (0, 1))
    return section(
        "memory",
        title,
        said(
            "What the fullest rank had allocated at its fullest moment, beyond what it held before training. "
            + ("The thin bar is the earlier comparison." if before is not None and before.measured else "")
        ),
        _key(told),
        said(
            f"A bar with a gap is cut short, for all others could not be read beside it: {', '.join(cut)}."
            if cut
            else ""
        ),
        figure(lambda width: stacked(told, before, width), table),
        *(said(own(told, c), "own") for c in told.cells if c.own),
        said(f"Not measured: {', '.join(missing)}." if missing else ""),
    )


def _cells(told: Told) -> str:
    head = ["cell", "loss", "median step", "× time", "samples/s"]
    cuda, measured = any(a.on is not None for c in told.measured for a in c.memory), not _assumed(told)
    memory = columns(cuda=cuda, measured=measured)
    base = told.found.baseline
    rows: list[list[str]] = []
    for cell in told.cells:
        row = cell.row
        if row.outcome != "ran" or not row.timed:
            rows.append([cell.cell, HEADS.get(row.outcome, "") + (row.note or row.outcome)])
            continue
        found = told.found.agreement(row)
        verdict = "reference" if row is told.found.reference else str(found or NONE)
        factor = f"{cell.middle / median(base.timed):.2f}" if base is not None else NONE
        rows.append(
            [
                cell.cell,
                verdict + (" ✗" if found is not None and not found.within else ""),
                format_duration(cell.middle),
                factor,
                f"{told.found.samples / cell.middle:.1f}",
                *three(row, told.found.world(row)),
            ]
        )
    return section(
        "cells",
        "Every cell",
        tabled([*head, *memory], rows, "What each cell costs, and whether it agrees", (0, 1)),
        meant(cuda=cuda, measured=not _assumed(told)),
    )


def _assumed(told: Told) -> bool:
    """Whether any figure of CUDA is a prediction."""
    return any(isinstance(there(fullest(c.memory), told.found.world(c.row)), Predicted) for c in told.measured)


def _changed(told: Told, before: Told | None) -> str:
    if before is None:
        return ""
    head = ["cell", "memory before", "now", "change", "step before", "now", "change"]
    differ = changes.keys(before.config, told.config)
    known = bool(before.config and told.config)
    return section(
        "changed",
        "Before and after",
        *(said(text, "worry") for text in changes.warnings(before, told)),
        tabled(head, changes.rows(before, told), f"Since {before.folder}"),
        tabled(["key", "before", "now"], differ, "What the configs say differently", (0, 1, 2)) if differ else "",
        said("Both configs say the same." if known and not differ else "" if known else "One config was not kept."),
    )


def _bridges(told: Told) -> str:
    base = base_of(told)
    others = [c for c in ranked(told.measured, told) if c is not base]
    if base is None or not others:
        return ""

    def one(cell: Seen) -> str:
        moved = [[WORDS[c], f"{'−' if d < 0 else '+'}{format_size(abs(d))}"] for c, d in moves(base, cell).items()]
        table = tabled(["category", "difference"], moved, f"From {base.cell} to {cell.cell}")
        return figure(lambda width: bridge(base, cell, width), table)

    first, *rest = others
    return section(
        "bridge",
        "Which bytes moved where",
        said(f"From {base.cell} to {first.cell}, the smallest other: each row begins where the last one ended."),
        one(first),
        *(f"<details><summary>From {e(base.cell)} to {e(c.cell)}</summary>{one(c)}</details>" for c in rest),
    )


def _through(told: Told, before: Told | None) -> str:
    drawn = drawable(told.measured)
    if not drawn:
        return ""
    rows = [
        [
            c.cell,
            *(format_size(p.peak) if (p := next((p for p in a.phases if p.name == n), None)) else NONE for n in PHASES),
        ]
        for c, a in drawn
    ]
    dashed = " Dashed: the earlier comparison." if before is not None else ""
    return section(
        "through",
        "Memory through a step",
        said(
            "Along the time of one step of the fullest rank: phases are as long as in a plain step, allocations "
            f"evenly spread within each. Panels share a scale unless they say so.{dashed}"
        ),
        figure(
            lambda width: through(told, before, width),
            tabled(["cell", *PHASES], rows, "The fullest moment of each phase"),
        ),
    )


def _balance(told: Told) -> str:
    if not any(len(c.memory) > 1 for c in told.measured):
        return ""
    ranks = sorted({a.rank for c in told.measured for a in c.memory})
    rows = [
        [c.cell, *(next((format_size(a.peak.peak) for a in c.memory if a.rank == r), NONE) for r in ranks)]
        for c in told.measured
    ]
    return section(
        "balance",
        "Balance between ranks",
        said("A dot a rank; at the right, how much more the fullest holds than the emptiest."),
        figure(
            lambda width: balance(told, width), tabled(["cell", *(f"rank {r}" for r in ranks)], rows, "Peak by rank")
        ),
    )


def _losses(told: Told) -> str:
    ran = [c.row for c in told.cells if c.row.outcome == "ran" and c.row.losses]
    if not ran:
        return ""
    head = ["step", *(row.cell for row in ran)]
    rows = [[str(i + 1), *(f"{row.losses[i]:.8g}" for row in ran)] for i in range(len(ran[0].losses))]
    parts = [figure(lambda width: losses(told, width), tabled(head, rows, "Loss by step"))]
    if series := parted(told):
        worst = [[n, f"{max(v):.1e}" if max(v) else "same bits", str(v.index(max(v)) + 1)] for n, v in series if v]
        bounds = ["same bits", f"< {SHADES[0]:g}", *(f"< {b:g}" for b in SHADES[1:]), f"≥ {SHADES[-1]:g}"]
        key = "".join(f'<li><i class="s{i}"></i>{e(words)}</li>' for i, words in enumerate(bounds))
        parts += [
            "<h3>How far each is from one process</h3>",
            said(
                "Relative to the loss where that is above 1. Allowed over the first 20 steps in "
                f"{told.found.precision}: {tolerance(told.found.precision):g}; a cross is beyond that."
            ),
            f'<ul class="key">{key}</ul>',
            figure(
                lambda width: differences(told, width),
                tabled(["cell", "largest difference", "at step"], worst, "The largest difference of each cell"),
            ),
        ]
    return section(
        "losses",
        "Losses",
        said("One process as a dark line, every cell above it: where they agree, one line is seen."),
        *parts,
    )


def _pareto(told: Told, before: Told | None) -> str:
    cells = [c for c in told.measured if c.timed]
    if not cells:
        return ""
    rows = [[c.cell, format_size(c.peak), f"{told.found.samples / c.middle:.1f}"] for c in cells]
    table = tabled(["cell", "memory at the peak", "samples/s"], rows, "Throughput and memory")
    aside = f" {one.cell}, one process, is not ranked." if (one := told.found.reference) is not None else ""
    moved = " A line leads from where a cell was before." if before is not None and before.measured else ""
    return section(
        "pareto",
        "Throughput against memory",
        said(f"Better is up and to the left. Filled: no other cell beats it in both.{aside}{moved}"),
        figure(lambda width: pareto(told, before, width), table),
    )


def _times(told: Told, before: Told | None) -> str:
    if not told.timed:
        return ""
    rows = [
        [c.cell, *(format_duration(s) for s in (min(c.timed), halves(c)[0], c.middle, halves(c)[1], max(c.timed)))]
        for c in told.timed
    ]
    head = ["cell", "fastest", "middle half from", "median", "to", "slowest"]
    below = " Below it, the middle half before." if before is not None else ""
    return section(
        "times",
        "Time of a step",
        said(f"A dot a step, of the slowest rank; the bar is the middle half, the line the median.{below}"),
        figure(lambda width: times(told, before, width), tabled(head, rows, "Time of a step")),
    )


def _sent(told: Told) -> str:
    kinds = sorted({kind for c in told.measured for a in c.memory for kind in a.sent})
    if not kinds:
        return ""
    known = [(c.cell, a) for c in told.measured if (a := c.fullest)]
    rows = [[cell, *(format_size(a.sent[k]) if k in a.sent else NONE for k in kinds)] for cell, a in known]
    ways = {a.sent_by: [cell for cell, b in known if b.sent and b.sent_by == a.sent_by] for _, a in known if a.sent_by}
    return section(
        "sent",
        "What a step sends",
        tabled(["cell", *kinds], rows, "Payload bytes of one step by collective"),
        said(
            "Of each call the whole tensor that it is about: of what a rank gives and what it gets the larger.", "note"
        ),
        *(said(f"{', '.join(cells)}: by {way}.", "note") for way, cells in ways.items()),
    )


def _configs(told: Told) -> str:
    whose = "what was asked"
    asked = dict(told.config)
    if not asked:
        known = next((c for c in told.cells if c.config), None)
        if known is None:
            return ""
        asked, whose = dict(known.config), known.cell
    rows = [[c.cell, key, now] for c in told.cells if c.config for key, _, now in changes.keys(asked, c.config)]
    return section(
        "configs",
        "Configs",
        tabled(["cell", "key", "is"], rows, f"Where a cell's config differs from {whose}", (0, 1, 2)) if rows else "",
        keys_of(asked, f"All keys of {whose}"),
    )


def _how(told: Told) -> str:
    accounts = [(c, a) for c in told.cells if (a := c.fullest) is not None]
    methods = sorted({a.method for _, a in accounts})
    keeps = ["before the timed steps malloc is told to keep what is freed"] if settled(a for _, a in accounts) else []
    notes = sorted({f"{c.cell}: {note}" for c, a in accounts for note in a.notes})
    saved = [[c.cell, *(format_size(s) for s in a.saved)] for c, a in accounts if a.saved is not None]
    asked = [f"--cell {shlex.quote(c.cell)}" for c in told.cells if c.row is not told.found.rows[0]]
    config, out = asked_of(told.folder, told.found.name), told.folder.parent
    places = [shlex.quote(str(config)), f"--out {shlex.quote(str(out))}"]
    command = ["unipar compare", *places, *asked, "--overwrite"]
    return section(
        "how",
        "How it was measured",
        listed([*methods, *told.found.remarks(), *keeps, *notes]),
        tabled(["cell", "by lifetime", "as autograd saved them"], saved, "Activations at the end of a forward")
        if saved
        else "",
        assumptions() if _assumed(told) else "",
        installed(told.machine, told.versions),
        again(" ".join(command) if told.config and told.folder.name == "compare" else ""),
    )
