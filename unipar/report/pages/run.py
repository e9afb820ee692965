"""report.html of one run: its losses, time, memory, config, versions, and the command that starts it again."""

from __future__ import annotations

from collections.abc import Sequence

from unipar.backend import Category
from unipar.memory.account import CATEGORIES, Account, Phase
from unipar.report.charts.lines import Line, lines
from unipar.report.data import changes
from unipar.report.data.headline import WORDS
from unipar.report.data.run import Ran
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
from unipar.results.memory_tables import fullest, included
from unipar.utils.text import count_of, format_duration, format_size

NONE = "–"


def page(ran: Ran, before: Ran | None = None) -> str:
    """All of it; with `before`, an earlier run's curves behind this one's."""
    sections = [
        _losses(ran, before),
        _changed(ran, before),
        _evals(ran),
        _times(ran, before),
        _memory(ran),
        _config(ran),
        _how(ran),
    ]
    return whole(f"unipar run: {ran.name}", _head(ran, before), sections)


def answer(ran: Ran) -> str:
    """What became of it, in one line."""
    found = ran.report
    took = f"{count_of(found.steps, 'step')}; {format_duration(found.seconds)} from the first event to the last"
    if not found.losses:
        return f"{took}; no loss was written down."
    (first, a), (last, b) = found.losses[0], found.losses[-1]
    return f"The loss is {a:.4f} at step {first} and {b:.4f} at step {last}: {took}."


def _state(ran: Ran) -> tuple[str, str, str]:
    if ran.report.stopped is not None:
        return "open", "?", f"stopped by a signal after step {ran.report.stopped}"
    if ran.died:
        return "bad", "✗", f"failed: {ran.died}"
    if not ran.ended:
        return "bad", "✗", "it did not come to its end, or goes on: this is what was written down until now"
    return "good", "✓", "it came to its end"


def _head(ran: Ran, before: Ran | None) -> str:
    found = ran.report
    facts = [ran.name, found.cell, count_of(found.size, "rank"), f"{found.parameters:,} parameters"]
    kind, sign, words = _state(ran)
    since = f"Before, {before.folder}: {answer(before)}" if before is not None else ""
    return "\n".join(
        [
            "<header>",
            f'<p class="kicker">unipar run · {e(" · ".join(facts))}</p>',
            f"<h1>{e(together(answer(ran)))}</h1>",
            *(said(text, "worry") for text in (changes.unlike(before, ran) if before is not None else [])),
            said(since, "since"),
            f'<p class="badge {kind}"><b aria-hidden="true">{sign}</b> {e(words)}</p>',
            f'<p class="where">Ran on {e(located(ran.machine, ran.versions))}.</p>',
            *(said(problem, "worry") for problem in [*ran.problems, *(before.problems if before is not None else ())]),
            "</header>",
        ]
    )


def _series(ran: Ran, before: Ran | None) -> list[Line]:
    old = [Line(f"before, {name}", "curve before", points) for name, points in _named(before)] if before else []
    return old + [Line(name, "curve", points) for name, points in _named(ran)]


def _named(ran: Ran) -> list[tuple[str, Sequence[tuple[int, float]]]]:
    parts = {f"loss of {name}": points for name, points in ran.report.parts.items()}
    return [(name, points) for name, points in (parts or {"loss": ran.report.losses}).items() if points]


def _losses(ran: Ran, before: Ran | None) -> str:
    if not ran.report.losses:
        return ""
    rows = [
        [
            str(row["step"]),
            f"{row['loss']:.8g}",
            *(NONE if row.get(key) is None else f"{row[key]:.4g}" for key in ("norm", "lr")),
        ]
        for row in ran.rows
    ]
    head = ["step", "loss", "norm of the gradient", "rate"]
    return section(
        "losses",
        "Losses",
        said("Of the global batch, in the steps that were logged." + (" Dashed: before." if before else "")),
        figure(lambda width: lines(_series(ran, before), width, "Loss by step"), tabled(head, rows, "Loss by step")),
    )


def _changed(ran: Ran, before: Ran | None) -> str:
    if before is None:
        return ""
    differ = changes.keys(before.config, ran.config)
    known = bool(before.config and ran.config)
    return section(
        "changed",
        "Before and after",
        *(said(text, "worry") for text in changes.moved(before.machine, ran.machine, before.versions, ran.versions)),
        tabled(["key", "before", "now"], differ, "What the configs say differently", (0, 1, 2)) if differ else "",
        said("Both configs say the same." if known and not differ else "" if known else "One config was not kept."),
    )


def _evals(ran: Ran) -> str:
    if not ran.report.evals:
        return ""
    names = list(dict.fromkeys(name for _, values in ran.report.evals for name in values))
    rows = [[str(s), *(f"{v[n]:.6g}" if v.get(n) is not None else NONE for n in names)] for s, v in ran.report.evals]
    return section("evals", "Evaluations", tabled(["step", *names], rows, "Metrics of the validation data"))


def _times(ran: Ran, before: Ran | None) -> str:
    own = Line("ms a step", "curve", _times_of(ran))
    if not own.points:
        return ""
    old = [Line("before, ms a step", "curve before", _times_of(before))] if before and _times_of(before) else []
    rows = [
        [str(row["step"]), format_duration(row["seconds"]), f"{row['samples'] / row['seconds']:.1f}"]
        for row in ran.rows
        if row.get("seconds") and row.get("samples")
    ]
    return section(
        "times",
        "Time of a step",
        said("Milliseconds a step on rank 0, the mean since the line before; with all that a run does between steps."),
        figure(
            lambda width: lines([*old, own], width, "Milliseconds a step"),
            tabled(["step", "a step", "samples/s"], rows, "Time of a step"),
        ),
    )


def _times_of(ran: Ran) -> list[tuple[int, float]]:
    return [(int(row["step"]), 1e3 * row["seconds"]) for row in ran.rows if row.get("seconds")]


def _memory(ran: Ran) -> str:
    peaks = [[str(rank), NONE if peak is None else format_size(peak)] for rank, peak in ran.peaks.items()]
    logged, ended = ran.report.memory[-1:], any(ran.peaks.values())
    if not ended and not ran.memory and not logged:
        return section("memory", "Memory", said("No rank wrote down what it held: that comes at a run's end."))
    parts: list[str] = []
    if ended:
        parts.append(tabled(["rank", "peak RSS"], peaks, "The most that each rank ever held, as the system counts it"))
        parts.append(said("" if all(ran.peaks.values()) else f"{NONE}: it wrote down no end.", "note"))
    if ran.memory:
        parts += _account(fullest(ran.memory))
    for step, phases in () if ran.memory else logged:
        parts.append(_phases(phases, f"Step {step} on the fullest rank, by phase and category"))
        parts.append(said("Beyond what was there before the model was built."))
    notes = [f"rank {account.rank}: {note}" for account in ran.memory for note in account.notes]
    return section("memory", "Memory", *parts, listed([*ran.watched, *notes]))


def _account(account: Account) -> list[str]:
    label = f"Allocated on rank {account.rank}, the fullest, by phase and category"
    how = f"{included([account])} ({account.method})"
    base = f"Allocated: beyond the {format_size(account.base)} that were there before the model was built; {how}."
    return [_phases(account.phases, label), said(base)]


def _phases(phases: Sequence[Phase], label: str) -> str:
    shown: list[Category] = [c for c in CATEGORIES if any(c in phase.held for phase in phases)]
    rows = [
        [phase.name, format_size(phase.peak), *(format_size(phase.held[c]) if c in phase.held else NONE for c in shown)]
        for phase in phases
    ]
    return tabled(["phase", "peak", *(WORDS[c] for c in shown)], rows, label)


def _config(ran: Ran) -> str:
    if not ran.config:
        return ""
    return section("configs", "Config", keys_of(ran.config, "All keys"))


def _how(ran: Ran) -> str:
    return section(
        "how",
        "How it ran",
        installed(ran.machine, ran.versions),
        again(ran.command),
        said("" if ran.command else "A script started it by launch() with a task of its own: run that again.", "note"),
    )
