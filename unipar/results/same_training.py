"""Whether two cells trained the same thing: from what, on which samples, in which precision, as their ranks saw it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Self, TypedDict

from unipar.config import Section
from unipar.errors import ReportError
from unipar.utils.text import count_of


class RankMarks(TypedDict):
    """By one rank."""

    values: dict[str, int]
    kept: list[str]
    computed: list[str]
    batches: list[list[str]]
    samples: list[tuple[int, int]]
    readers: int
    total: int
    precision: str


def rank_marks_path(run: Path, rank: int) -> Path:
    return run / f"rank-{rank}.alike.json"


class TrainingMarks(Section):
    """What all ranks of a cell saw; the same training has the same, whoever cuts it."""

    values: dict[str, str]
    """By parameter, what stands for the bits of its first values."""

    kept: tuple[str, ...]
    """Dtypes of the weights that the optimizer moves."""

    computed: tuple[str, ...]
    """Dtypes in which matrices are multiplied; none where nobody looked."""

    batches: tuple[tuple[str, ...], ...]
    """Of the first steps, what stands for the contents of each microbatch."""

    samples: tuple[tuple[int, str], ...]
    """Of each step, how many samples there were, and what stands for their numbers in the data."""

    readers: int = 0
    """On how many ranks it depends which samples make a batch; 0: on none."""

    total: int = 0
    """Samples of a step, as was asked."""

    precision: str = ""
    """As was asked."""

    @classmethod
    def read(cls, run: Path, ranks: int) -> Self:
        told: list[RankMarks] = []
        for rank in range(ranks):
            try:
                told.append(json.loads(rank_marks_path(run, rank).read_text("utf-8")))
            except (OSError, ValueError):
                raise ReportError(f"{rank_marks_path(run, rank)} does not say what rank {rank} trained on") from None
        names = dict.fromkeys(chain.from_iterable(seen["values"] for seen in told))
        return cls(
            values={name: _add_hashes(seen["values"].get(name, 0) for seen in told) for name in names},
            kept=_distinct_words(seen["kept"] for seen in told),
            computed=_distinct_words(seen["computed"] for seen in told),
            batches=tuple(
                tuple(sorted(chain(*step))) for step in zip(*(seen["batches"] for seen in told), strict=True)
            ),
            samples=tuple(
                (sum(count for count, _ in step), _add_hashes(mark for _, mark in step))
                for step in zip(*(seen["samples"] for seen in told), strict=True)
            ),
            readers=told[0]["readers"],
            total=told[0]["total"],
            precision=told[0]["precision"],
        )


def _add_hashes(numbers: Iterable[int]) -> str:
    return f"{sum(numbers) % (1 << 64):016x}"


def _distinct_words(words: Iterable[list[str]]) -> tuple[str, ...]:
    return tuple(sorted({*chain.from_iterable(words)}))


def describe_training_difference(
    mine: TrainingMarks, others: Mapping[str, TrainingMarks], *, one_total: bool = True
) -> str:
    """Why it is not the training of the others; empty: nothing speaks against it. `one_total`: all have one batch."""
    beside = ((name, m) for name, m in others.items() if m.readers == mine.readers)
    read = next(((name, m) for name, m in beside if one_total or m.total == mine.total), None)
    cast = next(((name, m) for name, m in others.items() if m.precision == mine.precision), None)
    said = [
        *(_compare_initial_values(mine, theirs, name) for name, theirs in list(others.items())[:1]),
        *([_compare_samples(mine, read[1], read[0])] if read is not None else []),
        *([_compare_dtypes(mine, cast[1], cast[0])] if cast is not None else []),
    ]
    return "; ".join(filter(None, said))


def _compare_initial_values(mine: TrainingMarks, theirs: TrainingMarks, other: str) -> str:
    moved = [name for name, mark in mine.values.items() if theirs.values.get(name, mark) != mark]
    if not moved:
        return ""
    more = f", and {count_of(len(moved) - 1, 'parameter')} more" if len(moved) > 1 else ""
    return f"{moved[0]} begins with other values than in {other}{more}: model() must follow from train.seed alone"


def _compare_samples(mine: TrainingMarks, theirs: TrainingMarks, other: str) -> str:
    for step, ((count, mark), (theirs_count, theirs_mark)) in enumerate(
        zip(mine.samples, theirs.samples, strict=False), 1
    ):
        if count != theirs_count:
            return f"step {step} trains on {count_of(count, 'sample')}, and on {theirs_count} in {other}"
        if mark != theirs_mark:
            return f"step {step} trains on other samples than in {other}"
    for step, (batches, theirs_batches) in enumerate(zip(mine.batches, theirs.batches, strict=False), 1):
        if len(batches) == len(theirs_batches) and batches != theirs_batches:
            return (
                f"step {step} is given other values for the same samples than in {other}: what data() yields must "
                "follow from the index and the seed alone"
            )
    return ""


def _compare_dtypes(mine: TrainingMarks, theirs: TrainingMarks, other: str) -> str:
    one, two = _describe_dtypes(mine), _describe_dtypes(theirs)
    if mine.kept == theirs.kept and (mine.computed == theirs.computed or not mine.computed or not theirs.computed):
        return ""
    return f"it {one}, and {other} {two}, though both were asked for {mine.precision}"


def _describe_dtypes(marks: TrainingMarks) -> str:
    computes = f"computes in {' and '.join(marks.computed)}, " if marks.computed else ""
    return f"{computes}keeps weights in {' and '.join(marks.kept)}"
