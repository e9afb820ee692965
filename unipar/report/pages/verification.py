"""Page of `unipar verify`: the table, and an SVG figure of the losses and their differences from one process."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

from unipar.results.verdicts import Verdict, Verdicts

FIGURE_PIXELS, HEIGHT, LEFT, RIGHT = 860, 250, 76, 190
LINE_COLOURS = (
    "#1f6fb4",
    "#d2691e",
    "#2e8b57",
    "#8a4fb0",
    "#b0305c",
    "#6b6b2a",
    "#1b8a9a",
    "#9a6a3a",
    "#555555",
    "#c09000",
)


def draw_verification(now: Verdicts) -> str:
    """Return one SVG: losses by step above, differences from one process below."""
    rows = [row for row in now.rows if row.losses]
    base = _one_process_losses(now)
    below = HEIGHT + 60
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{FIGURE_PIXELS}" height="{below + HEIGHT + 30}" '
        f'viewBox="0 0 {FIGURE_PIXELS} {below + HEIGHT + 30}" font-family="sans-serif" font-size="12">',
        f'<rect width="{FIGURE_PIXELS}" height="{below + HEIGHT + 30}" fill="white"/>',
        *_losses(rows, base, 20),
        *_differences(rows, base, now.allowed.get("loss", []), below),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _one_process_losses(now: Verdicts) -> list[float]:
    return next((run["loss"] for name, run in now.one.items() if name == "one process"), [])


def _finite(values: Sequence[float]) -> list[float]:
    return [v for v in values if math.isfinite(v)]


def _losses(rows: Sequence[Verdict], base: Sequence[float], top: int) -> list[str]:
    series = [(row.cell, row.losses) for row in rows] + [("one process", list(base))]
    values = _finite([v for _, losses in series for v in losses]) or [0.0, 1.0]
    low, high = min(values), max(values)
    panel = _Panel(top, len(base), low, high if high > low else low + 1.0)
    marks = [low + (panel.high - low) * i / 4 for i in range(5)]
    return [
        *panel.frame("loss by step", [(m, f"{m:.4g}") for m in marks]),
        *(panel.line(losses, _color(i, name), name, i) for i, (name, losses) in enumerate(series)),
    ]


def _differences(rows: Sequence[Verdict], base: Sequence[float], allowed: Sequence[float], top: int) -> list[str]:
    """Draw the differences on a logarithmic scale; bit-for-bit equal losses are on its lowest line."""
    series = [(r.cell, [abs(a - b) for a, b in zip(r.losses, base, strict=False)]) for r in rows]
    values = _finite([v for _, d in [*series, ("", list(allowed))] for v in d if v > 0]) or [1e-8, 1e-6]
    low, high = math.floor(math.log10(min(values))) - 1, math.ceil(math.log10(max(values)))
    panel = _Panel(top, len(base), float(low), float(max(high, low + 1)))

    def logged(values: Sequence[float]) -> list[float]:
        return [math.log10(v) if v > 0 else float(low) for v in values]

    every = max(1, (high - low) // 6)
    return [
        *panel.frame(
            "difference from the loss of one process; dashed: allowed",
            [(float(e), f"1e{e}" if e > low else "same") for e in range(low, high + 1, every)],
        ),
        *(panel.line(logged(d), _color(i, name), name, i) for i, (name, d) in enumerate(series)),
        panel.line(logged(allowed), "#000000", "allowed", len(series), dashed=True),
    ]


def _color(i: int, name: str) -> str:
    return "#000000" if name == "one process" else LINE_COLOURS[i % len(LINE_COLOURS)]


class _Panel:
    """One panel of the figure: axes, and lines in them."""

    def __init__(self, top: int, steps: int, low: float, high: float) -> None:
        self.top, self.steps, self.low, self.high = top, max(steps, 1), low, high

    def x(self, step: int) -> float:
        """Return the horizontal position of a step (from 1)."""
        inner = FIGURE_PIXELS - LEFT - RIGHT
        return LEFT + inner * (step - 1) / max(self.steps - 1, 1)

    def y(self, value: float) -> float:
        """Return the vertical position of a value."""
        return self.top + 20 + (HEIGHT - 20) * (self.high - value) / (self.high - self.low)

    def frame(self, title: str, marks: Sequence[tuple[float, str]]) -> list[str]:
        """Return the title, the grid with its marks, and the steps, as SVG shapes."""
        right, bottom = FIGURE_PIXELS - RIGHT, self.top + HEIGHT
        shapes = [f'<text x="{LEFT}" y="{self.top + 8}" font-weight="bold">{html.escape(title)}</text>']
        for value, text in marks:
            y = self.y(value)
            shapes.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="#dddddd"/>')
            shapes.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{html.escape(text)}</text>')
        steps = range(1, self.steps + 1, max(1, self.steps // 10))
        return shapes + [f'<text x="{self.x(s):.1f}" y="{bottom + 16}" text-anchor="middle">{s}</text>' for s in steps]

    def line(self, values: Sequence[float], color: str, name: str, place: int, *, dashed: bool = False) -> str:
        """Return one curve and its entry in the legend, as SVG shapes."""
        points = " ".join(
            f"{self.x(i + 1):.1f},{self.y(min(max(v, self.low), self.high)):.1f}"
            for i, v in enumerate(values)
            if not math.isnan(v)
        )
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        y = self.top + 24 + 14 * place
        x = FIGURE_PIXELS - RIGHT + 14
        return (
            f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.5"{dash}/>\n'
            f'<line x1="{x}" y1="{y - 4}" x2="{x + 18}" y2="{y - 4}" stroke="{color}" stroke-width="2"{dash}/>'
            f'<text x="{x + 24}" y="{y}" font-size="11">{html.escape(name)}</text>'
        )


def render_verification(now: Verdicts) -> str:
    """Return the page: the table and the figure in one self-contained HTML file."""
    title = html.escape(f"unipar verify: {now.name}")
    return "\n".join(
        [
            "<!doctype html>",
            f'<html lang="en"><head><meta charset="utf-8"><title>{title}</title>',
            "<style>body{font-family:sans-serif;max-width:900px;margin:2em auto;padding:0 1em}"
            "pre{background:#f6f6f6;padding:1em;overflow-x:auto}svg{max-width:100%;height:auto}</style></head><body>",
            f"<h1>{title}</h1>",
            f"<pre>{html.escape(now.table(110))}</pre>",
            draw_verification(now),
            "</body></html>",
            "",
        ]
    )
