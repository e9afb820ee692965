"""Figure of the tokens of experts: a row per layer and a square per expert, darker with its share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from unipar.report.charts.bars import NARROW_BELOW_PIXELS
from unipar.report.charts.svg import Drawing, fit_name, text_width

SHARE_BOUNDS = (0.5, 0.8, 1.25, 2.0, 3.0)
"""Bounds between the shades of a share times the number of experts; no token has a shade of its own."""


def share_shade(share: float) -> int:
    """Return the shade of a share times the number of experts: 0 without tokens, 3 about even."""
    return 0 if share == 0 else 1 + sum(share >= bound for bound in SHARE_BOUNDS)


def draw_expert_shares(layers: Mapping[str, Sequence[int]], width: int) -> str:
    """Draw the tokens of each layer's experts."""
    small = width < NARROW_BELOW_PIXELS
    left = 0.0 if small else max(text_width(name) for name in layers) + 14
    step, most = 40 if small else 24, max(map(len, layers.values()))
    drawing = Drawing(width, step * len(layers) + 34, "Tokens of each expert, by layer")
    each = (width - left) / most
    for i, (name, tokens) in enumerate(layers.items()):
        y = step * i + (18 if small else 0)
        if small:
            drawing.text(0, y - 5, fit_name(name, width), "name")
        else:
            drawing.text(left - 12, y + 15, name, "name", "end")
        for expert, count in enumerate(tokens):
            share = count * len(tokens) / sum(tokens)
            tip = f"{name}, expert {expert}: {count:,} tokens, {share:.2f} times an even share"
            x = left + each * expert
            drawing.rect(x, y + 1, max(each - 1, 0.5), 19, f"s{share_shade(share)}", tip)
            if count == 0 and each > 10:
                drawing.line((x + 2, y + 4), (x + each - 3, y + 17), "cross")
                drawing.line((x + 2, y + 17), (x + each - 3, y + 4), "cross")
    stride = max(1, -(-most // (8 if small else 16)))
    for expert in range(0, most, stride):
        drawing.text(left + each * (expert + 0.5), step * len(layers) + 14, str(expert), "tick", "middle")
    drawing.text(width, step * len(layers) + 30, "expert", "tick", "end")
    return str(drawing)
