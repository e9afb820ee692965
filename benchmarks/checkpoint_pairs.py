"""Pairs of engines, one of which saves and the other goes on: `python -m benchmarks.checkpoint_pairs`.

Each strategy trains a few steps and saves; every strategy loads each of these checkpoints, which must give it exactly
the tensors that were saved, and trains on beside one process that was never interrupted. Then each strategy by itself
from one number of ranks to another. First a dense model, then a mixture of experts on four ranks. Exit 1: a pair
differs, or fails without a refusal.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import unipar
from unipar.backend.checks import in_strategy
from unipar.config import Strategy
from unipar.config.config_source import load_given_config
from unipar.errors import UniparError

ROOT = Path(__file__).parents[1]
STRATEGIES = (
    "native/nothing",
    "native/optimizer",
    "native/parameters",
    "native/nothing+tensor2",
    "native/nothing+pipeline2",
    "native/nothing+context2",
    "deepspeed/nothing",
    "deepspeed/optimizer",
    "deepspeed/gradients",
    "deepspeed/parameters",
    "horovod/nothing",
    "accelerate/nothing",
    "accelerate/parameters",
    "accelerate/parameters+zero",
)
"""Engines that save and go on, of every library."""

EXPERT_STRATEGIES = (
    "native/nothing",
    "native/nothing+expert2",
    "native/nothing+expert4",
    "native/parameters+expert2",
    "native/nothing+tensor2",
    "native/nothing+tensor2+expert2",
    "native/nothing+pipeline2+expert2",
    "deepspeed/optimizer+expert2",
    "deepspeed/parameters+expert4",
)
"""Engines that save and go on with a mixture of experts."""


@dataclass(frozen=True)
class Subject:
    """A model, and where it is trained."""

    task: Mapping[str, Any]
    strategies: Sequence[str]
    ranks: int
    """Number of ranks on which each strategy goes on from each other one."""

    worlds: Sequence[tuple[int, int]]
    """Numbers of ranks of the run that saves and of the one that goes on."""


GPT = {"layers": 2, "width": 32, "heads": 4, "context": 16}
SUBJECTS = {
    "dense": Subject(
        {"use": f"{ROOT}/examples/char_gpt.py:CharGPT", "args": GPT}, STRATEGIES, 2, ((2, 1), (1, 2), (2, 4), (4, 2))
    ),
    "mixture": Subject(
        {"use": f"{ROOT}/tests/support/expert_models.py:OfTransformers", "args": {"auxiliary": False}},
        EXPERT_STRATEGIES,
        4,
        ((2, 4), (4, 2), (4, 1)),
    ),
}

HALF, STEPS = 3, 13
"""Steps before the checkpoint, and in all."""

OPTIMIZER: dict[str, Any] = {"name": "adamw", "lr": 1e-3, "decay": "matrices"}
"""Section train.optimizer, whose name `--optimizer` changes."""


def config_of(subject: Subject, steps: int, **more: Any) -> dict[str, Any]:
    """Return the config of a small model, trained for so many steps."""
    return {
        "task": subject.task,
        "device": "cpu",
        "batch": {"total": 16, "micro": 16 // (2 * subject.ranks)},
        "train": {"steps": steps, "optimizer": dict(OPTIMIZER), "clip": 1.0},
        "log": {"every": 1},
        **more,
    }


def save_in(subject: Subject, strategy: str, ranks: int, folder: Path) -> Path:
    """Train the first half in a strategy and return its checkpoint."""
    parsed = Strategy.parse(strategy)
    out = folder / f"{parsed.slug}-{ranks}"
    checkpoint = out / "checkpoints" / f"step-{HALF:08d}"
    if checkpoint.exists():
        return checkpoint
    config = config_of(subject, HALF, checkpoint={"every": None}, parallel={"data": ranks}, out=str(out))
    unipar.launch(in_strategy(load_given_config(config), str(parsed)), quiet=True)
    return checkpoint


def go_on(
    subject: Subject, checkpoint: Path, strategies: Sequence[str], ranks: int, folder: Path
) -> Mapping[str, tuple[bool, str]]:
    """Have strategies go on from a checkpoint; return for each whether all is well, and the words for the table."""
    out = folder / f"{checkpoint.parents[1].name}-to-{ranks}"
    if ranks == 1:
        return {strategy: _alone(subject, checkpoint, strategy, out) for strategy in strategies}
    config = config_of(subject, STEPS, out=str(out))
    found = unipar.verify(config, strategies=strategies, world=ranks, steps=STEPS, resume=checkpoint, overwrite=True)
    told = {"agrees": "equal", "refused": "refused"}
    return {
        row.strategy: (
            row.outcome in told,
            told.get(row.outcome, row.outcome) + (f" {row.share:.2f}" if row.share is not None else f": {row.note}"),
        )
        for row in found.rows
    }


def _alone(subject: Subject, checkpoint: Path, strategy: str, out: Path) -> tuple[bool, str]:
    """Go on in one process and compare the losses with those of one that was never interrupted."""
    config = config_of(subject, STEPS, resume=str(checkpoint), parallel={"data": 1})
    alone = config_of(subject, STEPS, backend="single", out=f"{out}-whole")
    whole = unipar.launch(alone, quiet=True, overwrite=True)
    source = in_strategy(load_given_config({**config, "out": f"{out}-{Strategy.parse(strategy).slug}"}), strategy)
    mine = unipar.launch(source, quiet=True, overwrite=True)
    wanted = dict(whole.losses)
    off = max(abs(loss - wanted[step]) / wanted[step] for step, loss in mine.losses)
    return off < 1e-5, f"{'equal' if off < 1e-5 else 'differs'} {off:.0e}"


def rows_of_pairs(
    subject: Subject, savers: Sequence[str], strategies: Sequence[str], folder: Path
) -> Iterator[tuple[str, Mapping[str, tuple[bool, str]]]]:
    """Yield each strategy that saves, and for each that goes on whether all is well, and words."""
    for strategy in savers:
        print(f"{strategy} saves", file=sys.stderr, flush=True)
        try:
            saved = save_in(subject, strategy, subject.ranks, folder)
            found = go_on(subject, saved, strategies, subject.ranks, folder)
        except UniparError as e:
            found = dict.fromkeys(strategies, (False, f"failed: {e}"))
        yield strategy, found


def print_pairs(subject: Subject, savers: Sequence[str], strategies: Sequence[str], folder: Path) -> bool:
    """Print each row of the matrix when it is known, and then what is not equal; return whether all is well."""
    print(
        f"rows: saved on {subject.ranks} ranks after step {HALF}; columns: gone on with to step {STEPS}, "
        "the difference of allowed"
    )
    wide = max(map(len, strategies)) + 4
    print(" " * wide + "".join(f"{number:>5}" for number, _ in enumerate(strategies, 1)), flush=True)
    others: list[str] = []
    for strategy, found in rows_of_pairs(subject, savers, strategies, folder):
        words = {to: word for to, (_, word) in found.items() if not word.startswith("equal ")}
        shown = ["-" if to in words else found[to][1].removeprefix("equal ") for to in strategies]
        label = f"{strategies.index(strategy) + 1 if strategy in strategies else '':>2} {strategy}"
        print(f"{label:<{wide}}" + "".join(f"{word:>5}" for word in shown), flush=True)
        others += [f"{strategy} to {to}: {word}" for to, word in words.items()]
        others += [f"{strategy} to {to} is not well" for to, (well, _) in found.items() if not well]
    print("\n".join(others))
    return not any(line.endswith(" is not well") for line in others)


def print_worlds(subject: Subject, savers: Sequence[str], folder: Path) -> bool:
    """Print for each strategy that goes on, on other numbers of ranks, the same; return whether all is well."""
    print("saved by a strategy on some ranks, gone on with by itself and by native/parameters on others:")
    good = True
    for strategy in savers:
        for before, after in subject.worlds:
            if before < Strategy.parse(strategy).axes.fewest_ranks:
                continue
            both = dict.fromkeys((strategy, "native/parameters"))
            others = [other for other in both if Strategy.parse(other).axes.fewest_ranks <= after]
            print(f"{strategy} from {before} to {after}", file=sys.stderr, flush=True)
            try:
                found = go_on(subject, save_in(subject, strategy, before, folder), others, after, folder)
            except UniparError as e:
                found = dict.fromkeys(others, (False, f"failed: {e}"))
            words = ", ".join(f"{word} in {other}" for other, (_, word) in found.items())
            print(f"{strategy:<28}{before} to {after}: {words}", flush=True)
            good = good and all(well for well, _ in found.values())
    return good


def main() -> int:
    """Print both tables; return the exit code."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoint_pairs", description=__doc__)
    parser.add_argument("--model", choices=SUBJECTS, help="one of both models")
    parser.add_argument("--strategies", help="strategies that save and go on, with commas")
    parser.add_argument("--saved-by", help="only those of them that save: some rows of the tables")
    parser.add_argument("--only", choices=("pairs", "worlds"), help="one of both tables")
    parser.add_argument(
        "--optimizer", default="adamw", choices=("sgd", "adam", "adamw", "muon"), help="what they train"
    )
    given = parser.parse_args()
    OPTIMIZER["name"] = given.optimizer
    good = True
    for model in (given.model,) if given.model else SUBJECTS:
        subject = SUBJECTS[model]
        strategies = given.strategies.split(",") if given.strategies else subject.strategies
        savers = given.saved_by.split(",") if given.saved_by else strategies
        print(f"{model} model")
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            if given.only != "worlds":
                good = print_pairs(subject, savers, strategies, folder) and good
            if given.only != "pairs":
                good = print_worlds(subject, savers, folder) and good
    print("all pairs are equal, or refused in a sentence" if good else "some pairs differ")
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
