"""Models that others wrote, split over a mesh and verified: `python -m benchmarks.mesh [MODEL ...]`.

With `--write` their rows replace those of the report. `--drawn SEED` verifies twenty small models instead that
are drawn by this seed. Exit 1: a strategy disagrees, or fails without a refusal.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

import unipar
from benchmarks.drawn_models import Draw
from unipar.backend import registry
from unipar.backend.offered_strategies import config_in_strategy
from unipar.config import Config, Strategy
from unipar.config.config_source import load_given_config
from unipar.errors import UniparError
from unipar.launcher.processes import early, starters
from unipar.launcher.processes.forkserver import ForkServer
from unipar.results.loss_agreement import loss_tolerance, measure_agreement
from unipar.results.verdicts import Verdict, format_share
from unipar.utils.table import format_table
from unipar.utils.text import count_of, format_duration

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "benchmarks/reports/mesh-models.md"
STEPS = 4
STRATEGIES = {
    "native/nothing+tensor2": 2,
    "native/nothing+tensor2+sequence": 2,
    "native/nothing+pipeline2": 2,
    "native/nothing+context2": 2,
    "native/nothing+tensor2+pipeline2": 4,
    "native/parameters+tensor2": 4,
    "native/parameters+pipeline2": 4,
}
"""Ranks of each strategy."""

EXPERT_STRATEGIES = {
    "native/nothing+expert2": 2,
    "native/nothing+expert4": 4,
    "native/parameters+expert2": 4,
    "native/parameters+expert4": 4,
    "native/parameters+tensor2+expert2": 4,
    "native/nothing+pipeline2+expert2": 4,
    "native/nothing+context2+expert2": 4,
}
"""Ranks of each strategy of mixtures of experts."""

ATTENTION_STRATEGIES = {
    "native/nothing+context2": 2,
    "native/nothing+context4": 4,
    "native/nothing+tensor2+context2": 4,
    "native/nothing+pipeline2+context2": 4,
    "native/parameters+context2": 4,
}
"""Ranks of each strategy of one way of attention over ranks."""

TABLES = (STRATEGIES, ATTENTION_STRATEGIES, EXPERT_STRATEGIES)
"""Strategies of each table of the report."""

REFUSALS = ("parallel.", "parallel (", "split as planned")
"""Beginnings of sentences that say why a model cannot be split; anything else is a failure."""


@dataclass(frozen=True)
class Subject:
    """A model as it is trained here."""

    task: str
    args: Mapping[str, Any] = field(default_factory=dict[str, Any])
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    trained: bool = False
    """Whether its trainings are compared with one process, dropout included; `verify` would set that to 0."""

    imports: str = "torch"
    """Module that it is made from."""

    strategies: Mapping[str, int] = field(default_factory=lambda: STRATEGIES)
    """Ranks of the strategies in which it is verified."""


def _here(name: str, imports: str = "torch", **more: Any) -> Subject:
    return Subject(f"{ROOT}/benchmarks/mesh_models.py:{name}", imports=imports, **more)


def _mixture(task: str, imports: str = "torch", **args: Any) -> Subject:
    use = f"{ROOT}/tests/support/expert_models.py:{task}"
    return Subject(use, args, imports=imports, strategies=EXPERT_STRATEGIES)


GPT2, LLAMA = (f"transformers.models.{name}.modeling_{name}" for name in ("gpt2", "llama"))
SUBJECTS: dict[str, Subject] = {
    "gpt": Subject(f"{ROOT}/examples/char_gpt.py:CharGPT", {"layers": 4, "width": 32, "heads": 4, "context": 16}),
    "gpt2": _here("GPT2", GPT2),
    "llama": _here("Llama", LLAMA),
    "bert": _here("Bert", "transformers.models.bert.modeling_bert"),
    "t5": _here("T5", "transformers.models.t5.modeling_t5"),
    "vit": _here("ViT", "transformers.models.vit.modeling_vit"),
    "encoder": _here("Encoder"),
    "translator": _here("Translator"),
    "lora": _here("LoRA", "peft"),
    "gpt2-dropout": _here("GPT2", GPT2, args={"dropout": 0.1}, trained=True),
    "llama-bf16": _here("Llama", LLAMA, settings={"train.precision": "bf16-mixed"}),
    **{
        f"llama-{way}": _here(
            "Llama", LLAMA, settings={"options.native.attention": way}, strategies=ATTENTION_STRATEGIES
        )
        for way in ("gather", "ring", "ulysses")
    },
    **{
        name.lower(): _mixture("OfTransformers", "transformers", name=name, auxiliary=False)
        for name in ("Mixtral", "Qwen3Moe", "DeepseekV3", "Olmoe", "GptOss")
    },
    "mixtral-auxiliary": _mixture("OfTransformers", "transformers", name="Mixtral"),
    "stacked-experts": _mixture("OfUser", kind="stacked"),
    "listed-experts": _mixture("OfUser", kind="list"),
}
"""Models by the names that the command takes."""

DRAWN_STRATEGIES = ("native/nothing+tensor2", "native/nothing+pipeline2")
"""Strategies in which models are verified that are drawn by a seed."""


def drawn_subjects(seed: int, count: int) -> dict[str, Subject]:
    """Return as many models, drawn by a seed, by a description of each."""
    draws = [Draw.of(seed, number) for number in range(count)]
    return {
        f"{number}: {draw}": Subject(
            f"{ROOT}/benchmarks/drawn_models.py:Drawn",
            {"seed": seed, "number": number},
            draw.settings,
            imports=draw.module,
        )
        for number, draw in enumerate(draws)
    }


@dataclass(frozen=True)
class Row:
    """Outcome of one model in one strategy."""

    model: str
    strategy: str
    agrees: bool
    refused: bool
    says: str
    """Digits and the largest difference as a share of the allowed one; else why there are none."""

    @property
    def good(self) -> bool:
        return self.agrees or self.refused


def config_of(subject: Subject, ranks: int, out: str) -> Config:
    """Return the config with which a model is trained by so many ranks."""
    settings: dict[str, Any] = {
        "task": {"use": subject.task, "args": dict(subject.args)},
        "device": "cpu",
        "parallel": {"data": ranks},
        "batch": {"total": 16, "micro": 4},
        "train": {"steps": STEPS, "optimizer": {"name": "adamw", "lr": 1e-3, "decay": "matrices"}, "clip": 1.0},
        "log": {"every": 1},
        "out": out,
    }
    return load_given_config(settings, subject.settings).config


def verified_rows(name: str, subject: Subject, ranks: int, strategies: Sequence[str]) -> Iterator[Row]:
    """Yield the verdicts on a model in strategies of so many ranks."""
    with tempfile.TemporaryDirectory(prefix="unipar-mesh-") as folder:
        verdicts = unipar.verify(config_of(subject, ranks, folder), strategies=strategies, world=ranks, steps=STEPS)
    if verdicts.interrupted:
        raise KeyboardInterrupt
    for verdict in verdicts.rows:
        yield row_of_verdict(name, verdict, verdicts.stopped)


def row_of_verdict(name: str, verdict: Verdict, stopped: str) -> Row:
    """Return the row of one verdict."""
    if verdict.outcome == "agrees":
        digits = "same bits" if verdict.digits is None else count_of(verdict.digits, "digit")
        exact = "; bit for bit the replay" if verdict.bits else ""
        return Row(name, verdict.strategy, True, False, f"{digits}, {format_share(verdict.share)} of allowed{exact}")
    if verdict.outcome == "disagrees":
        kind = verdict.finding.kind if verdict.finding is not None else ""
        return Row(name, verdict.strategy, False, False, f"DISAGREES: {kind or verdict.worst}")
    if verdict.outcome == "refused":
        return Row(name, verdict.strategy, False, True, f"refused: {verdict.note}")
    return Row(name, verdict.strategy, False, *_refused(verdict.note or stopped))


def trained_rows(name: str, subject: Subject, ranks: int, strategies: Sequence[str]) -> Iterator[Row]:
    """Yield how the losses of whole trainings agree with those of one process, with the dropout of that."""
    with tempfile.TemporaryDirectory(prefix="unipar-mesh-") as folder:
        config = config_of(subject, ranks, folder)
        one = losses_in(config, "single")
        for strategy in strategies:
            try:
                found = losses_in(config, strategy)
            except UniparError as e:
                yield Row(name, strategy, False, *_refused(str(e)))
                continue
            allowed = loss_tolerance(config.train.precision)
            agreement = measure_agreement(found, one, allowed)
            share = agreement.off / (allowed * max(1.0, abs(one[agreement.step - 1])))
            word = "" if agreement.within else "DISAGREES: "
            yield Row(name, strategy, agreement.within, False, f"{word}{agreement}, {format_share(share)} of allowed")


def losses_in(config: Config, strategy: str) -> list[float]:
    """Return the losses of a training in a strategy."""
    report = unipar.launch(config_in_strategy(config, Strategy.parse(strategy)), overwrite=True, quiet=True)
    return [loss for _, loss in report.losses]


def _refused(why: str) -> tuple[bool, str]:
    """Return whether a sentence is a refusal, and what the table says."""
    lines = [line.strip() for line in why.splitlines()]
    said = [line for line in lines if line.removeprefix("TaskError: ").startswith(REFUSALS)]
    return (True, f"refused: {said[-1].removeprefix('TaskError: ')}") if said else (False, f"FAILED: {' '.join(lines)}")


def rows_of(name: str, subject: Subject, strategies: Sequence[str]) -> Iterator[Row]:
    """Yield the rows of one model."""
    if (missing := missing_library(subject)) is not None:
        print(f"{name} is left out: {missing} is not installed (pip install {missing})", file=sys.stderr)
        return
    of_model = [strategy for strategy in strategies if strategy in subject.strategies]
    for ranks in dict.fromkeys(subject.strategies[strategy] for strategy in of_model):
        here = [strategy for strategy in of_model if subject.strategies[strategy] == ranks]
        rows = trained_rows if subject.trained else verified_rows
        yield from rows(name, subject, ranks, here)


def missing_library(subject: Subject) -> str | None:
    """Return the library that a model needs and that is not installed."""
    library = subject.imports.partition(".")[0]
    return library if importlib.util.find_spec(library) is None else None


@contextmanager
def shared_server(subjects: Sequence[Subject]) -> Generator[None]:
    """Context manager: all worlds are forks of one process that has imported transformers, which takes longest."""
    entries = ["unipar.verification.worker.entry", *starters.ENTRY_MODULES]
    modules = starters.modules_to_import([registry.find_backend("native")], entries)
    models = dict.fromkeys(s.imports for s in subjects if missing_library(s) is None)

    def lend(*_: object) -> AbstractContextManager[ForkServer]:
        return nullcontext(server)

    with (
        ForkServer([*modules, *models], {"HF_HUB_OFFLINE": "1"}) as server,
        patch.object(starters, "ForkServer", lend),
        patch.object(early, "begin_imports", lambda: None),
    ):
        server.wait_until_ready()
        yield


def page_rows(rows: Sequence[Row]) -> str:
    """Return the rows as Markdown: a model a line, a strategy a column, mixtures apart, refusals below."""
    notes: list[str] = []

    def shown(row: Row | None) -> str:
        if row is None or row.agrees:
            return "-" if row is None else row.says.replace(" of allowed", "")
        if row.says not in notes:
            notes.append(row.says)
        return f"({notes.index(row.says) + 1})"

    by = {(row.model, row.strategy): row for row in rows}
    tables: list[list[str]] = []
    for some in TABLES:
        here = [row for row in rows if SUBJECTS[row.model].strategies is some]
        strategies = list(dict.fromkeys(row.strategy for row in here))
        models = dict.fromkeys(row.model for row in here)
        lines = [
            f"| `{model}` | {' | '.join(shown(by.get((model, strategy))) for strategy in strategies)} |"
            for model in models
        ]
        head = f"| model | {' | '.join(f'`{strategy}`' for strategy in strategies)} |"
        tables += [[head, f"|{'---|' * (len(strategies) + 1)}", *lines, ""]] if lines else []
    below = [f"{i}. {note}" for i, note in enumerate(notes, 1)]
    return "\n".join([*chain(*tables), *below]).rstrip("\n")


def rows_of_table(table: str) -> list[Row]:
    """Return the rows of which `page_rows` has made a table."""
    notes = dict(line.split(". ", 1) for line in table.splitlines() if line[:1].isdigit())
    rows: list[Row] = []
    strategies: list[str] = []
    for line in table.splitlines():
        name, *cells = (cell.strip(" `") for cell in line.strip("|").split(" | "))
        if name == "model":
            strategies = cells
        elif line.startswith("| `"):
            said = zip(strategies, ((notes.get(cell.strip("()")), cell) for cell in cells), strict=True)
            rows += [Row(name, to, note is None, note is not None, note or cell) for to, (note, cell) in said]
    return [row for row in rows if row.says != "-"]


def written(page: str, table: str) -> str:
    """Return the page with this table in place of its own."""
    before, _, rest = page.partition("<!-- table -->\n")
    after = rest.partition("<!-- end -->\n")[2]
    return f"{before}<!-- table -->\n{table}\n<!-- end -->\n{after}"


def with_rows_of_page(page: str, rows: Sequence[Row]) -> list[Row]:
    """Return these rows, and those of the page of other models and strategies."""
    table = page.partition("<!-- table -->\n")[2].partition("<!-- end -->\n")[0]
    new = {(row.model, row.strategy) for row in rows}
    kept = [row for row in rows_of_table(table) if (row.model, row.strategy) not in new]
    models = [*SUBJECTS]

    def place(row: Row) -> tuple[int, int]:
        return models.index(row.model), [*SUBJECTS[row.model].strategies].index(row.strategy)

    return sorted([*kept, *rows], key=place)


def main(words: Sequence[str]) -> int:
    """Verify the models and print the table; return 1 where a strategy is wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mesh", description=__doc__)
    every = {strategy: ranks for some in TABLES for strategy, ranks in some.items()}
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(SUBJECTS))
    parser.add_argument("--strategies", action="append", default=[], metavar="STRATEGY", help=", ".join(every))
    parser.add_argument("--drawn", type=int, metavar="SEED", help="models that are drawn by this seed")
    parser.add_argument("--count", type=int, default=20, metavar="N", help="how many are drawn; default: 20")
    parser.add_argument("--write", action="store_true", help="write the rows into benchmarks/reports/mesh-models.md")
    given = parser.parse_args(words)
    usual = every if given.drawn is None else DRAWN_STRATEGIES
    strategies = [strategy for text in given.strategies for strategy in text.split(",")] or list(usual)
    if unknown := [*({*given.models} - {*SUBJECTS}), *({*strategies} - {*every})]:
        parser.error(f"{', '.join(unknown)}: the models are {', '.join(SUBJECTS)}; the strategies {', '.join(every)}")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    subjects = {name: SUBJECTS[name] for name in given.models or SUBJECTS}
    if given.drawn is not None:
        subjects = drawn_subjects(given.drawn, given.count)
    rows = list[Row]()
    with shared_server(list(subjects.values())):
        for name, subject in subjects.items():
            began = time.monotonic()
            for row in rows_of(name, subject, strategies):
                rows.append(row)
                print(f"{row.model} {row.strategy}: {row.says}", file=sys.stderr, flush=True)
            print(f"{name}: {format_duration(time.monotonic() - began)}", file=sys.stderr, flush=True)
    print(
        format_table(
            ("model", "strategy", "against one process"), [(r.model, r.strategy, r.says) for r in rows], width=120
        )
    )
    wrong = sum(not row.good for row in rows)
    print(
        f"\n{sum(r.agrees for r in rows)} of {count_of(len(rows), 'strategy')} agree with one process over {STEPS} "
        f"steps, {sum(r.refused for r in rows)} cannot be split and say why"
        + (f"; {wrong} DISAGREE or FAILED" if wrong else "")
    )
    if given.write and given.drawn is None:
        page = PAGE.read_text("utf-8")
        PAGE.write_text(written(page, page_rows(with_rows_of_page(page, rows))), "utf-8")
        print(f"written: {PAGE.relative_to(ROOT)}")
    return 1 if wrong or not rows else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
