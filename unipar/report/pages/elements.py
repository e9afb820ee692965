"""What report.html is put together from: sections, sentences, tables, figures that are drawn twice."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from importlib.resources import files
from typing import Any, Final

from unipar.utils.text import count_of, format_size

WIDE, NARROW = 920, 350
"""How wide a figure is drawn for a screen, and for a phone."""

GENERATOR: Final = '<meta name="generator" content="unipar">'
"""By which a page of ours is known."""

BODY: Final = "</head><body>"

e = html.escape


def whole(title: str, head: str, sections: Iterable[str]) -> str:
    """A page that needs nothing else, no network and no script."""
    style = files("unipar.report.pages").joinpath("page.css").read_text("utf-8")
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            GENERATOR,
            '<meta name="color-scheme" content="light dark">',
            f"<title>{e(title)}</title>",
            f"<style>{style}</style>{BODY}",
            head,
            "<main>",
            *filter(None, sections),
            "</main>",
            "</body></html>",
            "",
        ]
    )


def linked(page: str, links: Mapping[str, str]) -> str:
    """A page with links to others at its top, by what each is."""
    listed = " · ".join(f'<a href="{e(at)}">{e(label)}</a>' for label, at in links.items())
    return page.replace(BODY, f"{BODY}\n<nav>Beside it: {listed}</nav>", 1) if links else page


def section(name: str, title: str, *parts: str) -> str:
    return "\n".join([f'<section id="{name}"><h2>{e(title)}</h2>', *filter(None, parts), "</section>"])


def said(words: str, kind: str = "") -> str:
    return f"<p{classed(kind)}>{e(together(words))}</p>" if words else ""


def listed(words: Iterable[str]) -> str:
    """A point each; nothing where there are none."""
    items = "".join(f"<li>{e(together(text))}</li>" for text in words)
    return f"<ul>{items}</ul>" if items else ""


def together(words: str) -> str:
    """A number and its unit stay in one line."""
    return re.sub(r"(?<=\d) (?=%|[KMG]iB|B\b|m?s\b|us\b)", "\N{NO-BREAK SPACE}", words)


def classed(kind: str) -> str:
    return f' class="{kind}"' if kind else ""


def figure(draw: Callable[[int], str], table: str) -> str:
    """Drawn twice, for a screen and for a phone; the table behind it opens."""
    return (
        f'<figure><div class="wide">{draw(WIDE)}</div><div class="narrow">{draw(NARROW)}</div></figure>\n'
        f"<details><summary>The same as a table</summary>{table}</details>"
    )


def tabled(head: Sequence[str], rows: Iterable[Sequence[str]], label: str, text: Collection[int] = (0,)) -> str:
    """Figures end in line; the columns in `text` begin in line. A short row's last cell takes the rest."""

    def cells(row: Sequence[str]) -> str:
        made: list[str] = []
        for i, words in enumerate(row):
            short = f' colspan="{len(head) - i}"' if i == len(row) - 1 and len(row) < len(head) else ""
            kind = classed("text" if i in text or short else "")
            made.append(f'<th scope="row"{kind}>{e(words)}</th>' if i == 0 else f"<td{kind}{short}>{e(words)}</td>")
        return f"<tr>{''.join(made)}</tr>"

    tops = "".join(f'<th scope="col"{classed("text" if i in text else "")}>{e(h)}</th>' for i, h in enumerate(head))
    body = "\n".join(cells(row) for row in rows)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{e(label)}"><table><caption>{e(label)}</caption>'
        f"<thead><tr>{tops}</tr></thead><tbody>\n{body}\n</tbody></table></div>"
    )


def keys_of(config: Mapping[str, Any], label: str) -> str:
    """All that a config says, with dotted keys; it opens."""
    text = "\n".join(f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in config.items())
    return f"<details><summary>{e(label)}</summary><pre class='keys'>{e(text)}</pre></details>"


def again(command: str) -> str:
    """What to type to have it once more."""
    return f"<h3>To repeat it</h3><pre>{e(command)}</pre>" if command else ""


def located(machine: Mapping[str, Any], versions: Mapping[str, str], more: Sequence[str] = ()) -> str:
    """The machine, in words."""
    words = [str(machine["cpu"])] if "cpu" in machine else []
    words += [count_of(int(machine["cores"]), "core")] if isinstance(machine.get("cores"), int) else []
    words += [f"{format_size(float(machine['memory']))} of memory"] if isinstance(machine.get("memory"), int) else []
    words += [*more, *([f"torch {versions['torch']}"] if "torch" in versions else [])]
    return ", ".join(words) or "a machine that was not written down"


def installed(machine: Mapping[str, Any], versions: Mapping[str, str]) -> str:
    """The same as tables, beside each other."""
    rows = [[str(k), format_size(v) if k == "memory" and isinstance(v, int) else str(v)] for k, v in machine.items()]
    return "\n".join(
        [
            '<div class="pair">',
            tabled(["what", "version"], [[k, v] for k, v in versions.items()], "Versions", (0, 1)) if versions else "",
            tabled(["machine", ""], rows, "Machine", (0, 1)) if machine else "",
            "</div>",
        ]
    )
