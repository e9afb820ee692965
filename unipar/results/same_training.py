"""Check that two strategies trained the same: initial values, samples and precision, as their ranks recorded them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import NotRequired, Self, TypedDict

from unipar.config import Precision, Section
from unipar.errors import ReportError
from unipar.utils.text import count_of


class RankMarks(TypedDict):
    """Marks of what one rank trained, as its file holds them."""

    values: dict[str, int]
    kept: list[str]
    computed: list[str]
    batches: list[list[str]]
    samples: list[tuple[int, int]]
    readers: int
    total: int
    precision: str
    leads: bool
    fp8: NotRequired[str]


def rank_marks_path(run: Path, rank: int) -> Path:
    """Return the path of a rank's training marks in a run folder."""
    return run / f"rank-{rank}.alike.json"


class TrainingMarks(Section):
    """Marks of what all ranks of a strategy trained; equal for the same training, however it is split over ranks."""

    values: dict[str, str]
    """Hash of each parameter's initial values."""

    kept: tuple[str, ...]
    """Dtypes of the weights that the optimizer moves."""

    computed: tuple[str, ...]
    """Dtypes in which matrices are multiplied; empty if they were not observed."""

    batches: tuple[tuple[str, ...], ...]
    """Hashes of the contents of each microbatch in the first steps."""

    samples: tuple[tuple[int, str], ...]
    """Number of samples in each step, and a hash of their numbers in the data."""

    readers: int = 0
    """Number of ranks if batches depend on that; 0 if they do not."""

    total: int = 0
    """Samples of a step in the config."""

    precision: str = ""
    """Precision in the config."""

    fp8: str = ""
    """Linear layers that multiply in fp8, and what multiplies, as a sentence."""

    @classmethod
    def read(cls, run: Path, ranks: int) -> Self:
        """Return the marks of all ranks together; raise ReportError if a rank's file cannot be read."""
        marks: list[RankMarks] = []
        for rank in range(ranks):
            try:
                marks.append(json.loads(rank_marks_path(run, rank).read_text("utf-8")))
            except (OSError, ValueError):
                raise ReportError(f"{rank_marks_path(run, rank)} does not say what rank {rank} trained on") from None
        leading = [one for one in marks if one["leads"]]  # others trained on the same samples
        names = dict.fromkeys(chain.from_iterable(one["values"] for one in marks))
        return cls(
            values={name: _add_hashes(one["values"].get(name, 0) for one in marks) for name in names},
            kept=_distinct_words(one["kept"] for one in marks),
            computed=_distinct_words(one["computed"] for one in marks),
            batches=tuple(
                tuple(sorted(chain(*step))) for step in zip(*(one["batches"] for one in leading), strict=True)
            ),
            samples=tuple(
                (sum(count for count, _ in step), _add_hashes(mark for _, mark in step))
                for step in zip(*(one["samples"] for one in leading), strict=True)
            ),
            readers=marks[0]["readers"],
            total=marks[0]["total"],
            precision=marks[0]["precision"],
            fp8=marks[0].get("fp8", ""),
        )


def _add_hashes(numbers: Iterable[int]) -> str:
    return f"{sum(numbers) % (1 << 64):016x}"


def _distinct_words(words: Iterable[list[str]]) -> tuple[str, ...]:
    return tuple(sorted({*chain.from_iterable(words)}))


def judged_precision(precision: Precision, of_one: TrainingMarks | None) -> Precision:
    """Return the precision whose tolerance losses have: the config's, or bf16-mixed if frozen weights have fewer bits.

    The marks are those of one process: a strategy that computes in fewer bits by itself trains something else.
    """
    narrow = of_one is not None and any(word.startswith(("bfloat16", "float16")) for word in of_one.computed)
    return "bf16-mixed" if narrow and precision in ("fp32", "fp64") else precision


def describe_training_difference(
    mine: TrainingMarks, others: Mapping[str, TrainingMarks], *, one_total: bool = True
) -> str:
    """Return why a strategy did not train the same as the others, or ""; `one_total`: all have the same total batch."""
    same_readers = ((name, m) for name, m in others.items() if m.readers == mine.readers)
    same_batch = next(((name, m) for name, m in same_readers if one_total or m.total == mine.total), None)
    same_precision = next(((name, m) for name, m in others.items() if m.precision == mine.precision), None)
    differences = [
        *(_compare_initial_values(mine, theirs, name) for name, theirs in list(others.items())[:1]),
        *([_compare_samples(mine, same_batch[1], same_batch[0])] if same_batch is not None else []),
        *([_compare_dtypes(mine, same_precision[1], same_precision[0])] if same_precision is not None else []),
    ]
    return "; ".join(filter(None, differences))


def _compare_initial_values(mine: TrainingMarks, theirs: TrainingMarks, other: str) -> str:
    names = [name for name, mark in mine.values.items() if theirs.values.get(name, mark) != mark]
    if names:
        begins = f"{_first_of(names)} starts with other values than in {other}"
        return f"{begins}: model() must depend on train.seed only"
    if missing := [name for name in theirs.values if name not in mine.values]:
        return f"{_first_of(missing)} is trained in {other}, and none of the ranks here holds it"
    if more := [name for name in mine.values if name not in theirs.values]:
        return f"{_first_of(more)} is trained here, and none of the ranks of {other} holds it"
    return ""


def _first_of(names: list[str]) -> str:
    return names[0] + (f" (and {count_of(len(names) - 1, 'other parameter')})" if len(names) > 1 else "")


def _compare_samples(mine: TrainingMarks, theirs: TrainingMarks, other: str) -> str:
    for step, ((count, mark), (theirs_count, theirs_mark)) in enumerate(
        zip(mine.samples, theirs.samples, strict=False), 1
    ):
        if count != theirs_count:
            return f"step {step} trains on {count_of(count, 'sample')}, but on {theirs_count} in {other}"
        if mark != theirs_mark:
            return f"step {step} trains on other samples than in {other}"
    for step, (batches, theirs_batches) in enumerate(zip(mine.batches, theirs.batches, strict=False), 1):
        if len(batches) == len(theirs_batches) and batches != theirs_batches:
            return (
                f"step {step} has other values for the same samples than in {other}: what data() returns must depend "
                "on the index and the seed only"
            )
    return ""


def _compare_dtypes(mine: TrainingMarks, theirs: TrainingMarks, other: str) -> str:
    one, two = _describe_dtypes(mine), _describe_dtypes(theirs)
    if mine.kept == theirs.kept and (mine.computed == theirs.computed or not mine.computed or not theirs.computed):
        return ""
    return f"it {one}, but {other} {two}, although both have train.precision {mine.precision}"


def _describe_dtypes(marks: TrainingMarks) -> str:
    computes = f"computes in {' and '.join(marks.computed)} and " if marks.computed else ""
    return f"{computes}keeps weights in {' and '.join(marks.kept)}"
