"""Errors that users may meet: `make errors` prints each place that raises one, with its text.

A text says what is wrong (key or object, value), why, and what to do about it. `--without-way-out` prints those in
which no word says what to do; `--sample N --seed S` prints some of them, drawn by a seed.
"""

from __future__ import annotations

import argparse
import ast
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
ERRORS = {
    node.name
    for node in ast.parse((ROOT / "unipar/errors.py").read_text("utf-8")).body
    if isinstance(node, ast.ClassDef)
}
"""Names of the errors of unipar."""

WAY_OUT = re.compile(
    r"(?:^|[\s:;,(`'\"])(?:set|write|use|pass|give|add|remove|leave|choose|run|install|call|return|put|take|start|"
    r"delete|name|make|train|raise|open|wait|check|define|keep|let|export|import|save|read|load|turn|lower|free|"
    r"increase|reduce|change|try|say|look|mount|shorten|rename|replace|split|move|convert|build|divide|compare|"
    r"submit|resume|download|copy|close|compute|plan|do without|must|should|needs?|wanted|did you mean|such as|"
    r"known:|knows|"
    r"relative to|multiple of|at least|at most|has|have|only|`[a-z]|\(`)(?![a-z])"
)
"""Words by which a text says what to do, or what is allowed."""


@dataclass(frozen=True)
class RaisedError:
    """A place that raises an error, and its text as far as it stands there; {} are values."""

    place: str
    error: str
    text: str

    @property
    def has_way_out(self) -> bool:
        return WAY_OUT.search(self.text) is not None or self.text.count("{}") * 3 > len(self.text.split())


def raised_errors(files: Sequence[Path]) -> Iterator[RaisedError]:
    """Yield each `raise` of an error of unipar that has a text of its own."""
    for file in files:
        tree = ast.parse(file.read_text("utf-8"))
        for node in ast.walk(tree):
            if not isinstance(node, ast.Raise):
                continue
            call = node.exc
            if isinstance(call, ast.Call) and call.args and _name(call.func) in ERRORS:
                text = " ".join(_text(argument) for argument in call.args)
                yield RaisedError(f"{file.relative_to(ROOT)}:{node.lineno}", _name(call.func), text)


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _text(node: ast.expr) -> str:
    """Return the text of an expression, with {} for each value in it."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) for part in node.values)
    if isinstance(node, ast.BinOp):
        return _text(node.left) + _text(node.right)
    if isinstance(node, ast.List | ast.Tuple):
        return " | ".join(map(_text, node.elts))
    if isinstance(node, ast.IfExp):
        return f"({_text(node.body)} or {_text(node.orelse)})"
    return "{}"


def main(words: Sequence[str] | None = None) -> None:
    """Print the places, in the order of files."""
    parser = argparse.ArgumentParser(prog="make errors", description=__doc__)
    parser.add_argument("--without-way-out", action="store_true")
    parser.add_argument("--sample", type=int, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    wanted = parser.parse_args(words)
    files = sorted(file for folder in ("unipar", "backends") for file in (ROOT / folder).rglob("*.py"))
    errors = list(raised_errors(files))
    shown = [error for error in errors if not (wanted.without_way_out and error.has_way_out)]
    if wanted.sample:
        shown = random.Random(wanted.seed).sample(shown, min(wanted.sample, len(shown)))
    for error in shown:
        print(f"{error.place} {error.error}: {error.text}")
    without = sum(not error.has_way_out for error in errors)
    print(f"{len(errors)} places raise an error with a text; {without} of these texts name no way out")


if __name__ == "__main__":
    main()
