"""HTML elements of every page: page frame, sections, paragraphs, lists, tables, figures, listings."""

from __future__ import annotations

import base64
import html
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from unipar.report.data.result_changes import differing_key_rows
from unipar.utils.columns import Column, Reason, Row, row_texts
from unipar.utils.text import count_of, format_size

SCREEN_PIXELS, PHONE_PIXELS = 920, 350
"""Width of a figure for a screen, and for a phone."""

GENERATOR_TAG: Final = '<meta name="generator" content="unipar">'
"""Tag that marks a page as written by unipar."""

BODY_START_TAG: Final = "</head><body>"
"""Tags between head and body, after which links are inserted."""

NO_VALUE: Final = "–"
"""Text in tables of pages for a value that is not known."""

escape = html.escape

BadgeKind = Literal["good", "bad", "open"]
_BADGE_SIGNS: Final[dict[BadgeKind, str]] = {"good": "✓", "bad": "✗", "open": "?"}


class Badge(NamedTuple):
    """Verdict in a few words; open: there is none, or it needs a second look."""

    kind: BadgeKind
    words: str


def html_page(title: str, head: str, sections: Iterable[str]) -> str:
    """Return a self-contained page: styles inside, no network, no script."""
    style = files("unipar.report.html").joinpath("page.css").read_text("utf-8")
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            GENERATOR_TAG,
            '<meta name="color-scheme" content="light dark">',
            f"<title>{escape(title)}</title>",
            f"<style>{style}</style>{BODY_START_TAG}",
            head,
            "<main>",
            *filter(None, sections),
            "</main>",
            "</body></html>",
            "",
        ]
    )


def page_header(
    kicker: Sequence[str],
    headline: str,
    *,
    mismatches: Iterable[str] = (),
    since: str = "",
    badges: Iterable[Badge] = (),
    where: str = "",
    worries: Iterable[str] = (),
) -> str:
    """Return the head of a page: what it is of, its first sentence, the verdict, and warnings."""
    return "\n".join(
        [
            "<header>",
            f'<p class="kicker">{escape(" · ".join(kicker))}</p>',
            f"<h1>{escape(keep_units_together(headline))}</h1>",
            *(paragraph(text, "worry") for text in mismatches),
            *filter(None, [paragraph(since, "since")]),
            *(
                f'<p class="badge {badge.kind}"><b aria-hidden="true">{_BADGE_SIGNS[badge.kind]}</b> '
                f"{escape(badge.words)}</p>"
                for badge in badges
            ),
            *filter(None, [paragraph(where, "where")]),
            *(paragraph(text, "worry") for text in worries),
            "</header>",
        ]
    )


def colour_key(items: Iterable[tuple[str, str]]) -> str:
    """Return a legend: the class of each colour, and what it stands for."""
    listed = "".join(f'<li><i class="{kind}"></i>{escape(words)}</li>' for kind, words in items)
    return f'<ul class="key">{listed}</ul>'


def add_links(page: str, links: Mapping[str, str]) -> str:
    """Return the page with links at its top; `links` maps labels to addresses."""
    listed = " · ".join(f'<a href="{escape(at)}">{escape(label)}</a>' for label, at in links.items())
    return page.replace(BODY_START_TAG, f"{BODY_START_TAG}\n<nav>Related pages: {listed}</nav>", 1) if links else page


def html_section(name: str, title: str, *parts: str) -> str:
    """Return a section with an id and a title; empty parts are left out."""
    return "\n".join([f'<section id="{name}"><h2>{escape(title)}</h2>', *filter(None, parts), "</section>"])


def paragraph(words: str, kind: str = "") -> str:
    """Return a paragraph of class `kind`, or "" without words."""
    return f"<p{class_attribute(kind)}>{escape(keep_units_together(words))}</p>" if words else ""


def bullet_list(words: Iterable[str]) -> str:
    """Return a list with one item per sentence, or "" without sentences."""
    items = "".join(f"<li>{escape(keep_units_together(text))}</li>" for text in words)
    return f"<ul>{items}</ul>" if items else ""


def keep_units_together(words: str) -> str:
    """Return the words with a no-break space between each number and its unit."""
    return re.sub(r"(?<=\d) (?=%|[KMG]iB|B\b|m?s\b|us\b)", "\N{NO-BREAK SPACE}", words)


def class_attribute(kind: str) -> str:
    """Return a class attribute with a space before it, or "" for no class."""
    return f' class="{kind}"' if kind else ""


def html_figure(draw: Callable[[int], str], table: str) -> str:
    """Return a figure, drawn for a screen and for a phone, and a table with the same numbers that can be opened."""
    return (
        f'<figure><div class="wide">{draw(SCREEN_PIXELS)}</div>'
        f'<div class="narrow">{draw(PHONE_PIXELS)}</div></figure>\n'
        f"<details><summary>The same as a table</summary>{table}</details>"
    )


def images_row(name: str, images: Sequence[tuple[str, Path]]) -> str:
    """Return PNG files side by side, inside the page, each with its words below; one that is gone says so."""

    def shown(words: str, file: Path) -> str:
        if not file.is_file():
            return f"<figcaption>{escape(words)}: {escape(file.name)} is gone</figcaption>"
        data = base64.b64encode(file.read_bytes()).decode()
        image = f'<img alt="{escape(name)}, {escape(words)}" src="data:image/png;base64,{data}">'
        return f"{image}<figcaption>{escape(words)}</figcaption>"

    figures = "".join(f"<figure>{shown(words, file)}</figure>" for words, file in images)
    return f'<h3>{escape(name)}</h3><div class="images">{figures}</div>'


def html_table(head: Sequence[str], rows: Iterable[Sequence[str]], label: str, text: Collection[int] = (0,)) -> str:
    """Return a table; columns in `text` are left-aligned, others right. A short row's last cell spans the rest."""

    def cells(row: Sequence[str]) -> str:
        tags: list[str] = []
        for i, words in enumerate(row):
            short = f' colspan="{len(head) - i}"' if i == len(row) - 1 and len(row) < len(head) else ""
            kind = class_attribute("text" if i in text or short else "")
            tags.append(
                f'<th scope="row"{kind}>{escape(words)}</th>' if i == 0 else f"<td{kind}{short}>{escape(words)}</td>"
            )
        return f"<tr>{''.join(tags)}</tr>"

    tops = "".join(
        f'<th scope="col"{class_attribute("text" if i in text else "")}>{escape(h)}</th>' for i, h in enumerate(head)
    )
    body = "\n".join(cells(row) for row in rows)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label)}">'
        f"<table><caption>{escape(label)}</caption>"
        f"<thead><tr>{tops}</tr></thead><tbody>\n{body}\n</tbody></table></div>"
    )


def columns_table(
    columns: Sequence[Column[Row]],
    rows: Iterable[Row],
    label: str,
    *,
    reason: Callable[[Row], Reason | None] = lambda _: None,
    leading: int = 1,
) -> str:
    """Return a table; a row with a reason why it has no figures has the leading texts and the reason."""
    columns = [replace(column, format=column.page_format or column.format) for column in columns]
    texts = [row_texts(columns, row, unknown=NO_VALUE, reason=reason(row), leading=leading) for row in rows]
    text = [i for i, column in enumerate(columns) if not column.right]
    return html_table([column.head for column in columns], texts, label, text)


def config_listing(config: Mapping[str, Any], label: str) -> str:
    """Return all keys of a config, dotted, as a block that can be opened."""
    text = "\n".join(f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in config.items())
    return f"<details><summary>{escape(label)}</summary><pre class='keys'>{escape(text)}</pre></details>"


def config_differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return a table of the keys that differ between two configs, or a sentence if there are none or one is missing."""
    if rows := differing_key_rows(before, now):
        table = html_table(["key", "before", "now"], rows, "Keys that differ between the configs", (0, 1, 2))
        return table if before and now else "\n".join([table, paragraph("One of the configs was not kept.")])
    return paragraph("Both configs are the same." if before and now else "One of the configs was not kept.")


def repeat_command_block(command: str) -> str:
    """Return the command that repeats what the page shows, under a heading, or "" without a command."""
    return f"<h3>To repeat it</h3><pre>{escape(command)}</pre>" if command else ""


def describe_machine(machine: Mapping[str, Any], versions: Mapping[str, str], more: Sequence[str] = ()) -> str:
    """Return CPU, cores, memory, `more` and torch's version in one line, as far as they are known."""
    words = [str(machine["cpu"])] if "cpu" in machine else []
    words += [count_of(int(machine["cores"]), "core")] if isinstance(machine.get("cores"), int) else []
    words += [f"{format_size(float(machine['memory']))} of memory"] if isinstance(machine.get("memory"), int) else []
    words += [*more, *([f"torch {versions['torch']}"] if "torch" in versions else [])]
    return ", ".join(words) or "a machine that was not recorded"


def environment_tables(machine: Mapping[str, Any], versions: Mapping[str, str]) -> str:
    """Return the versions and the machine as two tables side by side."""
    rows = [[str(k), format_size(v) if k == "memory" and isinstance(v, int) else str(v)] for k, v in machine.items()]
    return "\n".join(
        [
            '<div class="pair">',
            html_table(["what", "version"], [[k, v] for k, v in versions.items()], "Versions", (0, 1))
            if versions
            else "",
            html_table(["machine", ""], rows, "Machine", (0, 1)) if machine else "",
            "</div>",
        ]
    )
