"""Section on experts over ranks: tokens of each, and how uneven they were over the steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

from unipar.report.charts.expert_shares import SHARE_BOUNDS, draw_expert_shares
from unipar.report.charts.lines import LineSeries, draw_lines
from unipar.report.charts.svg import line_class
from unipar.report.html.elements import colour_key, columns_table, html_figure, html_section, html_table, paragraph
from unipar.results.run_report import describe_experts
from unipar.utils.columns import Column

StepsOfExperts = Sequence[tuple[int, Mapping[str, Mapping[str, Any]]]]

_CURVES: Final = (("fullest", "fullest expert"), ("rank", "fullest rank"), ("microbatch", "fullest microbatch"))


def experts_section(steps: StepsOfExperts) -> str:
    """Return the section of a run's logged steps, or "" if no experts were counted."""
    if not steps:
        return ""
    last, layers = steps[-1]
    tokens: dict[str, list[int]] = {name: layer["tokens"] for name, layer in layers.items()}
    curves = {name: [(step, _most(layers, key)) for step, layers in steps] for key, name in _CURVES}
    return html_section(
        "experts",
        "Experts",
        paragraph(f"Tokens since the logged step before, of all ranks: {describe_experts(last, layers)}."),
        colour_key(_legend()),
        html_figure(
            lambda width: draw_expert_shares(tokens, width),
            html_table(
                ["layer", *map(str, range(max(map(len, tokens.values()))))],
                [[name, *(f"{n:,}" for n in each)] for name, each in tokens.items()],
                f"Tokens of each expert, up to step {last}",
            ),
        ),
        columns_table(_COLUMNS, list(layers.items()), f"Experts of each layer, up to step {last}"),
        paragraph(
            "By step, in the least even layer: the fullest expert, the fullest rank, and the fullest microbatch on a "
            "rank, divided by the mean. The last one decides how much memory the fullest rank needs."
        ),
        colour_key((line_class(i), name) for i, name in enumerate(curves)),
        html_figure(
            lambda width: draw_lines(
                [LineSeries(name, f"way {line_class(i)}", points) for i, (name, points) in enumerate(curves.items())],
                width,
                "Fullest divided by the mean, by step",
            ),
            html_table(
                ["step", *curves],
                [[str(step), *(f"{_most(each, key):.3f}" for key, _ in _CURVES)] for step, each in steps],
                "Fullest divided by the mean, by step",
            ),
        ),
    )


def _most(layers: Mapping[str, Mapping[str, Any]], key: str) -> float:
    return max(layer[key] for layer in layers.values())


def _legend() -> list[tuple[str, str]]:
    """Return the shades of the figure, and the shares that they stand for."""
    bounds = [f"{bound:g}" for bound in SHARE_BOUNDS]
    between = [f"{low} to {high}" for low, high in pairwise(bounds)]
    words = ["no token", f"below {bounds[0]} times an even share", *between, f"{bounds[-1]} and more"]
    return [(f"s{i}", text) for i, text in enumerate(words)]


_COLUMNS: Final[Sequence[Column[tuple[str, Mapping[str, Any]]]]] = (
    Column("layer", lambda layer: layer[0], right=False),
    Column("fullest expert", lambda layer: layer[1]["fullest"], "{:.3f}".format),
    Column("entropy", lambda layer: layer[1]["entropy"], "{:.3f}".format),
    Column("without tokens", lambda layer: layer[1]["unused"]),
    Column("fullest rank", lambda layer: layer[1]["rank"], "{:.3f}".format),
    Column("fullest microbatch", lambda layer: layer[1]["microbatch"], "{:.3f}".format),
)
