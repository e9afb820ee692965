"""Patterns and words that no text of unipar's has: docs, help, errors, pages of reports. `make words` prints each hit.

Code is left out: blocks, `inline code`, and strings that are not prose. Each entry has its reason, also the way
to write it better. ARGS are words of places: `make words ARGS=docs/verify.md`.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from typing_extensions import override

ROOT = Path(__file__).parents[1]

START: Final = r"(?:^|(?<=[.!?:;] )|(?<=[.!?]\n))"
"""Start of a sentence."""

FORBIDDEN: Final = {
    rf"{START}(?:Of|So) (?!far\b)[a-z0-9X]": "an inversion: begin with the subject",
    rf"{START}What [^.?\n]+\.": "a clause as the subject: name the thing",
    rf"{START}(?:Has|Have|Had|Is|Are|Was|Were|Does|Do|Did|Should|Could) [^.?!\n]+, [^.?!\n]+\.(?!\.)": (
        "an inversion for a condition: If X has changed, ..."
    ),
    r"\bIs it so\b|\bAre they\?": "a question for a heading: a noun phrase",
    r"\btold\b": "reported, listed, or passed to: say who reports what",
    r"\bso many\b|\bso much (?!as\b)\w+": "a number: N, or the number of ...",
    r"\b(?:lack|lacks|lacked|lacking)\b": "X is missing, does not have",
    r"\bas a whole\b|\b[Ww]hole (?:checkpoint|page|batch|epoch|run|table|file|suite|steps?|trace(?:back)?)\b": (
        "full, complete; whole only for what is not split"
    ),
    r"\b(?:crew|zygote|autopsy|ledger|payload|till|heed|birth|contest)s?\b": "a private word: see the glossary",
    r"\b(?:strategy|strategies) cells?\b|\bcells? of (?:the|a) (?:matrix|comparison)\b": "a strategy",
    r"\b[Ff]eeds?\b(?![ -]forward)": "a loader",
    r"\bmended\b|\b[Tt]ried once\b|\bset aside\b": "history: say what holds now",
    r"\bbusy with\b|\bslow hour\b|\bon one (?:day|afternoon)\b|\bbeside other work\b|\bin an hour\b": (
        "circumstances of a measurement: only its command, and index.md's paragraph on machines"
    ),
    r"\b(?:the|what is|as) (?:told|given|seen|odd|apart|found)(?=[.,;:])": "a participle as a noun: name the thing",
    r"\bif (?:it|they) (?:is|are) none\b|(?<!there )\bis none\b": "is not a ...",
    r"\bin one go\b|\bgoes? (?:with|without|by)\b": "works, uses, supports",
    r"\b(?:for|since) (?:else|otherwise)\b": "because otherwise",
    r"\b[Tt]hereby|\b[Tt]hereof|\b[Ww]herein\b|\b[Ww]hereof\b|\b[Tt]hither\b": "a word of contracts: by this, of it",
    r"\b(?:session|sandbox|this afternoon|my machine|our cluster)\b(?! (?:of|file|cookie))": (
        "docs do not speak of how work on unipar is organised"
    ),
}
"""Pattern of each, and why."""


@dataclass(frozen=True)
class Hit:
    """A forbidden word in a text."""

    place: str
    words: str
    reason: str

    @override
    def __str__(self) -> str:
        return f"{self.place}: {self.words!r}: {self.reason}"


def hits_in(text: str, place: str) -> Iterator[Hit]:
    """Yield each forbidden word or pattern of a text."""
    for pattern, reason in FORBIDDEN.items():
        for found in re.finditer(pattern, text, re.MULTILINE):
            yield Hit(place, " ".join(found[0].split())[:80], reason)


def prose_of(markdown: str) -> str:
    """Return a page without code and without addresses; each sentence of a paragraph, list or cell is on one line."""
    text = re.sub(r"^( *)(```|~~~).*?^\1\2", "", markdown, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"``.+?``|`[^`]*`", "X", text)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    lines: list[str] = []
    in_list = False
    for line in text.splitlines():
        begins = re.match(r" *(?:[-*|#>]|\d+\.) ?", line)
        if line.startswith("    ") and not in_list and not (lines and lines[-1]):  # code
            continue
        in_list = begins is not None if line.strip() and not line.startswith(" ") else in_list
        if begins or not line.strip() or not lines or not lines[-1]:
            lines.append(line[begins.end() :].strip() if begins else line.strip())
        else:
            lines[-1] += f" {line.strip()}"
    return "\n".join(re.sub(r" *\| *", "\n", line) if "|" in line else line for line in lines)


def page_hits(file: Path) -> list[Hit]:
    """Return the hits of a page of the docs."""
    return list(hits_in(prose_of(file.read_text("utf-8")), str(file.relative_to(ROOT))))


def pages() -> list[Path]:
    """Return README and every page of the docs."""
    return [ROOT / "README.md", ROOT / "tests/README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def help_hits() -> list[Hit]:
    """Return the hits in the help of each command."""
    import typer.main

    from unipar.cli.app import build_app

    def below(name: str, command: Any) -> Iterator[Hit]:
        texts = [command.help or "", *(getattr(one, "help", None) or "" for one in command.params)]
        for text in texts:
            yield from hits_in(prose_of(text.replace("\b\n", "")), f"unipar {name} --help".replace("  ", " "))
        for inner_name, inner in getattr(command, "commands", {}).items():
            yield from below(f"{name} {inner_name}".strip(), inner)

    return list(below("", typer.main.get_command(build_app())))


def key_hits() -> list[Hit]:
    """Return the hits in the descriptions of the config's keys."""
    import json

    from unipar.conversion.config_schema import schema_text

    texts = re.findall(r'"description": ("(?:[^"\\]|\\.)*")', schema_text())
    return [hit for text in texts for hit in hits_in(prose_of(json.loads(text)), "config.schema.json")]


def literal(node: ast.expr) -> str | None:
    """Return the text of a string, with X for what is filled in; None for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values)
    return None


def texts_of(trees: Iterable[ast.AST]) -> Iterator[tuple[str, int]]:
    """Yield each text of prose below some nodes, and its line; parts of an f-string come once."""
    for tree in trees:
        text = literal(tree) if isinstance(tree, ast.expr) else None
        if text is not None:
            if len(text.split()) > 2:
                yield text, getattr(tree, "lineno", 0)
        else:
            yield from texts_of(ast.iter_child_nodes(tree))


def source_hits(folders: Iterable[str], *, raised: bool) -> list[Hit]:
    """Return the hits in texts of the source: those that are `raised`, or all but docstrings."""
    hits: list[Hit] = []
    for file in sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py")):
        tree = ast.parse(file.read_text("utf-8"))
        nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Raise if raised else ast.stmt)]
        if not raised:
            nodes = [tree]
        docs = {
            id(node.value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        }
        seen: set[int] = set()
        for text, line in texts_of(without(nodes, docs)):
            if line not in seen or raised:
                seen.add(line)
                hits += hits_in(prose_of(text), f"{file.relative_to(ROOT)}:{line}")
    return hits


def without(nodes: Iterable[ast.AST], left_out: set[int]) -> Iterator[ast.AST]:
    """Yield the expressions below some nodes that are texts, without those left out."""
    for node in nodes:
        if id(node) in left_out:
            continue
        if isinstance(node, ast.expr) and literal(node) is not None:
            yield node
        else:
            yield from without(ast.iter_child_nodes(node), left_out)


def all_hits() -> Iterator[Hit]:
    """Yield the hits of all texts."""
    for page in pages():
        yield from page_hits(page)
    yield from help_hits()
    yield from key_hits()
    yield from source_hits(("unipar", "backends"), raised=True)
    yield from source_hits(("unipar/report",), raised=False)


def main() -> int:
    """Print each hit, or with words, those whose place contains one of them; return the exit code."""
    wanted = sys.argv[1:]
    hits = [hit for hit in all_hits() if not wanted or any(word in hit.place for word in wanted)]
    for hit in hits:
        print(hit)
    return 1 if hits else 0


if __name__ == "__main__":
    sys.exit(main())
