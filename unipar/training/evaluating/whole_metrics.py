"""Metrics that are no means: predictions gathered in sample order, and states of Metric objects merged over ranks."""

from __future__ import annotations

import enum
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from unipar.data.order import SampleKey
from unipar.distributed.world import World
from unipar.errors import TaskError
from unipar.task.gathered import Gathered, Score
from unipar.training.evaluating.metric_states import (
    RankStates,
    SavedStates,
    is_metric,
    list_lengths,
    merge_into,
    restore_states,
    save_states,
    single_metrics,
    states_of,
    without_own_sync,
)


class WholeKind(enum.Enum):
    """Substitute for a metric that is no mean in the result of a batch: its rows or states stay where they are."""

    GATHERED = "gathered"
    METRIC = "Metric"


class GatheredRows(NamedTuple):
    """One batch's rows of a gathered metric."""

    key: SampleKey
    """First sample of the batch."""

    columns: tuple[Any, ...]


@final
class WholeMetrics:
    """Rows and states of one rank, batch by batch, for metrics that are computed at the end from all ranks."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._metrics: dict[str, Any] = {}
        self._ends: dict[str, dict[tuple[str, str], list[tuple[SampleKey, int]]]] = {}
        self._rows: dict[str, list[GatheredRows]] = {}
        self._scores: dict[str, Score] = {}
        self._samples = 0
        self._key: SampleKey | None = None
        self._before: tuple[Sequence[Any], SavedStates] = (), ()
        """Metrics that were known before this batch, and their states."""

        self._calls = 0
        """Calls of `metrics` for this batch: a rank that has several stages of a pipeline runs it for each."""

        self.is_answer = True
        """Whether this rank's rows and states are those of the model: in a pipeline only the last stage's are."""

    def begin(self, attributes: Mapping[str, Any]) -> None:
        """Forget earlier evaluations, and what the task's own Metric objects hold."""
        own = [value for value in attributes.values() if is_metric(value)]
        for metric in {id(m): m for m in (*own, *self._metrics.values())}.values():
            metric.to(self._world.device)
            metric.reset()
        self._metrics, self._ends, self._rows, self._scores, self._samples = {}, {}, {}, {}, 0

    @contextmanager
    def batch(self, key: SampleKey | None, samples: int) -> Generator[None]:
        """Context manager around a batch that begins with this sample; None: the batch does not count."""
        known = list(self._metrics.values())
        self._key, self._calls, self._before = key, 0, (known, save_states(known))
        yield
        if key is None:
            self._undo()
        else:
            self._samples += samples

    def before_call(self) -> None:
        """Forget an earlier call of `metrics` for the same batch: the last one is the model's."""
        if self._calls:
            self._undo()
        self._calls += 1

    def _undo(self) -> None:
        known, saved = self._before
        restore_states(saved)
        for metric in self._metrics.values():
            if not any(metric is other for other in known):
                metric.reset()
        for rows in self._rows.values():
            rows[:] = [row for row in rows if row.key != self._key]
        for ends in (ends for states in self._ends.values() for ends in states.values()):
            ends[:] = [end for end in ends if end[0] != self._key]

    def take(self, metrics: Any) -> Any:
        """Return what `metrics` gave of the batch, with a `WholeKind` in the place of what is no mean."""
        if not isinstance(metrics, Mapping):
            return metrics
        return {name: self._take_one(str(name), value) for name, value in metrics.items()}

    def _take_one(self, name: str, value: Any) -> Any:
        if isinstance(value, Gathered):
            self._scores[name] = value.score
            rows = self._rows.setdefault(name, [])
            columns = tuple(_to_cpu(name, column) for column in value.columns)
            if len({len(column) for column in columns}) > 1:
                shown = " and ".join(str(len(column)) for column in columns)
                raise TaskError(f"metrics()[{name!r}]: gathered() got columns of {shown} rows; give each as many")
            if self._key is not None:
                rows.append(GatheredRows(self._key, columns))
            return WholeKind.GATHERED
        if is_metric(value):
            if self._metrics.setdefault(name, value) is not value:
                raise TaskError(
                    f"metrics()[{name!r}] is another Metric object than in the batch before: make it once, in the "
                    "task's __init__, so that it holds all batches"
                )
            if self._key is not None:
                ends = self._ends.setdefault(name, {})
                for state, length in list_lengths(value).items():
                    ends.setdefault(state, []).append((self._key, length))
            return WholeKind.METRIC
        return value

    def finish(self, names: Sequence[str]) -> dict[str, float]:
        """Return these metrics, computed on one rank from all ranks' rows and states; all ranks call it together."""
        if not names:
            return {}
        root, speakers = self._speakers()
        mine: dict[str, Any] | None = None
        if self._world.rank in speakers:
            mine = {name: self._payload(name) for name in names}
        outcome: tuple[dict[str, float], str] = {}, ""
        error: Exception | None = None
        ranks = [payload for payload in self._world.gather_objects(mine, root) if payload is not None]
        if self._world.rank == root:
            for name in names:
                try:
                    outcome[0].update(self._compute(name, [payload[name] for payload in ranks]))
                except Exception as e:  # the task's score, or a Metric's compute
                    error = e
                    outcome = {}, f"metrics()[{name!r}] could not be computed on rank {root}: {type(e).__name__}: {e}"
                    break
        values, fault = self._world.tell_objects(outcome, root)
        for metric in self._metrics.values():
            metric.reset()
        if isinstance(error, TaskError):
            raise error
        if fault:
            raise TaskError(fault) from error
        return values

    def _speakers(self) -> tuple[int, list[int]]:
        """Return the rank that computes, and for each share of the data the rank whose rows and states count."""
        world = self._world
        table = torch.full((world.size,), 0.0, dtype=torch.float64, device=world.device)
        table[world.rank] = world.data_rank + 1.0 if self.is_answer else 0.0
        first: dict[int, int] = {}
        for rank, share in enumerate(world.sum(table).tolist()):
            if share:
                first.setdefault(int(share), rank)
        speakers = [first[share] for share in sorted(first)]
        return speakers[0], speakers

    def _payload(self, name: str) -> Any:
        if name in self._scores:
            return self._rows[name]
        return {
            key: RankStates(self._samples, states_of(metric), self._ends.get(name, {}) if key == name else {})
            for key, metric in single_metrics(name, self._metrics[name]).items()
        }

    def _compute(self, name: str, ranks: Sequence[Any]) -> dict[str, float]:
        if name in self._scores:
            rows: list[GatheredRows] = sorted((row for rank in ranks for row in rank), key=lambda row: row.key)
            return _numbers(name, self._scores[name](*_joined(name, rows)))
        values: dict[str, float] = {}
        for key, metric in single_metrics(name, self._metrics[name]).items():
            with without_own_sync(metric):
                merge_into(metric, key, [rank[key] for rank in ranks], self._world.device)
                values |= _numbers(key, metric.compute())
        return values


def _to_cpu(name: str, column: Any) -> Any:
    """Return a column as it is kept: a tensor on the CPU, an array, or a list."""
    if isinstance(column, Tensor | np.ndarray) and column.ndim == 0:
        raise TaskError(f"metrics()[{name!r}]: gathered() got a single number; give one entry for each sample")
    if isinstance(column, Tensor):
        return column.detach().cpu()
    if isinstance(column, np.ndarray | list):
        return column
    if isinstance(column, tuple):
        return list(column)
    raise TaskError(
        f"metrics()[{name!r}]: gathered() got a {type(column).__name__}; give tensors, arrays or lists with one entry "
        "for each sample"
    )


def _joined(name: str, rows: Sequence[GatheredRows]) -> list[Any]:
    """Return the columns of all batches together."""
    joined: list[Any] = []
    for parts in zip(*(row.columns for row in rows), strict=True):
        if isinstance(parts[0], list):
            joined.append([entry for part in parts for entry in part])
            continue
        if len(shapes := sorted({tuple(part.shape[1:]) for part in parts})) > 1:
            raise TaskError(
                f"metrics()[{name!r}]: gathered() got rows of the shapes {', '.join(map(str, shapes))} in different "
                "batches: pad them to one length, or give a list with one entry for each sample"
            )
        joined.append(torch.cat(parts) if isinstance(parts[0], Tensor) else np.concatenate(parts))
    return joined


def _numbers(name: str, value: Any) -> dict[str, float]:
    """Return what a metric came to as numbers by name; a mapping gives several."""
    if isinstance(value, Mapping):
        return {key: number for k, v in value.items() for key, number in _numbers(f"{name}/{k}", v).items()}
    if isinstance(value, Tensor | np.ndarray):
        if int(np.prod(value.shape)) != 1:
            raise TaskError(
                f"metrics()[{name!r}] came to values of the shape {tuple(value.shape)}; return one number, or a "
                "mapping of names to numbers"
            )
        return {name: float(value.reshape(()))}
    try:
        return {name: float(value)}
    except (TypeError, ValueError):
        raise TaskError(
            f"metrics()[{name!r}] came to {value!r}; return one number, or a mapping of names to numbers"
        ) from None
