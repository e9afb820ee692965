"""Every example, small, verified in every strategy that it can run in: `python -m benchmarks.examples [NAME ...]`.

`--strategies STRATEGY` picks strategies; with `--write` the table replaces that of benchmarks/reports/examples.md.
Exit 1: a strategy disagrees, or fails without a refusal.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import unipar
from benchmarks.mesh import Row, row_of_verdict, written
from unipar.utils.table import format_table
from unipar.utils.text import count_of, format_duration

ROOT = Path(__file__).parents[1]
REPORT = ROOT / "benchmarks" / "reports" / "examples.md"
STEPS = 4
STRATEGIES = ("*", "native/nothing+tensor2", "native/nothing+pipeline2", "native/nothing+context2")
"""All strategies that split no sample, and three that do, on two ranks."""

_LANGUAGE = {"hidden": 32, "layers": 2, "heads": 2, "context": 32, "words": 512}
LARGER = ("gpt_7b", "llama_7b", "llama_70b")
"""Configs for `unipar plan`."""

SMALL: dict[str, Mapping[str, Any]] = {
    "char_gpt": {"task.args": {"layers": 2, "width": 32, "heads": 2, "context": 32}},
    "causal_lm": {"task.args": _LANGUAGE},
    "lora": {"task.args": _LANGUAGE | {"rank": 4}},
    "vit": {"task.args": {"layers": 2}},
    "diffusion": {"task.args": {"layers": 2}},
    "distillation": {"task.args": {"teacher": 8, "teacher_steps": 2}},
}
"""What makes an example smaller, by the name of its config."""

EXAMPLES = sorted({file.stem for file in (ROOT / "configs").glob("*.yaml")} - {"quickstart", *LARGER})
"""Names of the configs; the quickstart's is that of char_gpt."""


def verified_example(name: str, strategies: Sequence[str]) -> Iterator[Row]:
    """Yield the verdicts on an example."""
    config = ROOT / "configs" / f"{name}.yaml"
    with tempfile.TemporaryDirectory(prefix="unipar-examples-") as folder:
        overrides = {"out": folder, "device": "cpu"} | dict(SMALL.get(name, {}))
        verdicts = unipar.verify(
            config, strategies=strategies, world=2, steps=STEPS, overrides=overrides, overwrite=True
        )
    if verdicts.interrupted:
        raise KeyboardInterrupt
    for verdict in verdicts.rows:
        yield row_of_verdict(name, verdict, verdicts.stopped)


def short_verdict(row: Row) -> str:
    """Return what a row says in a word or two."""
    if row.refused:
        return "refused"
    digits, _, rest = row.says.partition(",")
    return f"{digits}{', replay' if 'replay' in rest else ''}" if row.agrees else "DISAGREES or FAILED"


def examples_table(rows: Sequence[Row]) -> str:
    """Return the rows as Markdown: a strategy a line, an example a column; refusals below."""
    names, by = list(dict.fromkeys(row.model for row in rows)), {(row.strategy, row.model): row for row in rows}
    notes: dict[str, int] = {}

    def shown(row: Row | None) -> str:
        if row is None or not row.refused:
            return "-" if row is None else short_verdict(row)
        return f"({notes.setdefault(row.says, len(notes) + 1)})"

    lines = [
        f"| `{strategy}` | {' | '.join(shown(by.get((strategy, name))) for name in names)} |"
        for strategy in dict.fromkeys(row.strategy for row in rows)
    ]
    head = [f"| strategy | {' | '.join(names)} |", f"|{'---|' * (len(names) + 1)}"]
    return "\n".join([*head, *lines, "", *(f"{i}. {said}" for said, i in notes.items())])


def main(words: Sequence[str]) -> int:
    """Verify the examples and print the table; return 1 if a strategy is wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.examples", description=__doc__)
    parser.add_argument("examples", nargs="*", metavar="NAME", help=", ".join(EXAMPLES))
    parser.add_argument(
        "--strategies", action="append", default=[], metavar="STRATEGY", help="strategies instead of all"
    )
    parser.add_argument("--write", action="store_true", help="write the table into benchmarks/reports/examples.md")
    given = parser.parse_args(words)
    if unknown := {*given.examples} - {*EXAMPLES}:
        parser.error(f"{', '.join(sorted(unknown))}: the examples are {', '.join(EXAMPLES)}")
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    rows: list[Row] = []
    for name in given.examples or EXAMPLES:
        began = time.monotonic()
        rows += verified_example(
            name, [strategy for text in given.strategies for strategy in text.split(",")] or STRATEGIES
        )
        print(f"{name}: {format_duration(time.monotonic() - began)}", file=sys.stderr, flush=True)
    head = ("example", "strategy", "against one process")
    print(format_table(head, [(r.model, r.strategy, r.says) for r in rows], width=120))
    agree, refused = sum(row.agrees for row in rows), sum(row.refused for row in rows)
    wrong = len(rows) - agree - refused
    print(
        f"\n{count_of(agree, 'strategy')} of {len(rows)} agree with one process over {STEPS} steps on 2 ranks, "
        f"{refused} are refused and say why" + (f"; {wrong} DISAGREE or FAILED" if wrong else "")
    )
    if given.write:
        REPORT.write_text(written(REPORT.read_text("utf-8"), examples_table(rows)), "utf-8")
        print(f"written: {REPORT.relative_to(ROOT)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
