"""Metrics that are no means, in one process: what an evaluation gives, and what it refuses in a sentence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MetricCollection
from torchmetrics.aggregation import CatMetric, MeanMetric
from torchmetrics.classification import MulticlassF1Score
from typing_extensions import override

import unipar
from tests.support.running import Line, running
from unipar.errors import TaskError


class Given(Line):
    """Ten samples in five batches of two, and metrics as the test says."""

    def __init__(self, metrics: Any, **attributes: Any) -> None:
        self._given = metrics
        vars(self).update(attributes)

    @override
    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        return self._given(self, model, batch)


def _evaluated(folder: Path, metrics: Any, times: int = 1, **attributes: Any) -> dict[str, float]:
    with running(Given(metrics, **attributes), folder) as run:
        for _ in range(times - 1):
            run.evaluate()
        return run.evaluate()


def _refused(folder: Path, metrics: Any, **attributes: Any) -> str:
    with pytest.raises(TaskError) as e:
        _evaluated(folder, metrics, **attributes)
    return str(e.value)


def test_columns_of_every_kind_arrive_whole_and_in_order(tmp_path: Path) -> None:
    """Tensors and arrays are concatenated, lists and tuples are joined; a mapping gives several numbers."""
    got: list[Any] = []

    def score(*columns: Any) -> dict[str, Any]:
        got.append(columns)
        return {"count": len(columns[0]), "mean": columns[0].mean()}

    def metrics(task: Any, model: Any, batch: Any) -> dict[str, Any]:
        x = batch[0]
        words = [f"word {int(i)}" for i in x]
        return {"all": unipar.gathered(x[:, 0], x.numpy(), words, tuple(words), score=score)}

    assert _evaluated(tmp_path, metrics) == {"all/count": 10.0, "all/mean": 5.5}
    ((tensor, array, words, same),) = got
    assert tensor.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0]
    assert isinstance(array, np.ndarray)
    assert array.shape == (10, 1)
    assert words == same == [f"word {i}" for i in range(1, 11)]


def test_rows_need_not_be_as_many_as_samples(tmp_path: Path) -> None:
    """One prediction a token, three or four in a sample."""

    def metrics(task: Any, model: Any, batch: Any) -> dict[str, Any]:
        tokens = torch.cat([torch.full((3 + int(i) % 2,), float(i)) for i in batch[0]])
        return {"last": unipar.gathered(tokens, score=_last_and_count)}

    assert _evaluated(tmp_path, metrics) == {"last": 45.0}


def test_metric_objects_count_each_evaluation_alone(tmp_path: Path) -> None:
    """The second evaluation gives what the first one gave; what the task put into the metric before is forgotten."""
    kept = CatMetric()
    kept.update(99.0)

    def metrics(task: Any, model: Any, batch: Any) -> dict[str, Any]:
        task.mean.update(batch[0])
        task.kept.update(batch[0].sum())
        return {"mean": task.mean, "half": task.half}

    mean = MeanMetric()
    found = _evaluated(tmp_path, metrics, times=2, mean=mean, half=mean * 0.5, kept=kept)
    assert found == {"mean": 5.5, "half": 2.75}


def test_a_collection_gives_each_of_its_metrics(tmp_path: Path) -> None:
    """By the name that the collection gives it; metrics of one kind share their states while they are updated."""
    several = MetricCollection({"micro": MulticlassF1Score(3, average="micro"), "macro": MulticlassF1Score(3)})

    def metrics(task: Any, model: Any, batch: Any) -> dict[str, Any]:
        x = batch[0][:, 0].long()
        task.several.update(x % 3, (x // 2) % 3)
        return {"f1": task.several}

    x = torch.arange(1, 11)
    micro, macro = MulticlassF1Score(3, average="micro"), MulticlassF1Score(3)
    wanted = {"f1/micro": float(micro(x % 3, (x // 2) % 3)), "f1/macro": float(macro(x % 3, (x // 2) % 3))}
    assert _evaluated(tmp_path, metrics, times=2, several=several) == wanted


def _two(*columns: Tensor) -> float:
    return 2.0


def _bad_score(*columns: Any) -> float:
    raise ValueError("only one class present")


def _itself(column: Any) -> Any:
    return column


def _nothing(column: Any) -> None:
    return None


def _last_and_count(column: Tensor) -> Tensor:
    return column[-1] + len(column)


REFUSED: dict[str, Callable[[Any, Any, Any], Any]] = {
    "metrics()['x']: gathered() got columns of 2 and 1 rows; give each as many": lambda t, m, b: {
        "x": unipar.gathered(b[0], b[0][:1], score=_two)
    },
    "metrics()['x']: gathered() got a single number; give one entry for each sample": lambda t, m, b: {
        "x": unipar.gathered(b[0].mean(), score=_two)
    },
    "metrics()['x']: gathered() got a float; give tensors, arrays or lists with one entry for each sample": (
        lambda t, m, b: {"x": unipar.gathered(1.0, score=_two)}
    ),
    "metrics()['x']: gathered() got rows of the shapes (4,), (6,), (8,), (10,), (12,) in different batches: pad them "
    "to one length, or give a list with one entry for each sample": lambda t, m, b: {
        "x": unipar.gathered(torch.zeros(2, int(b[0].max()) + 2), score=_two)
    },
    "metrics()['x'] could not be computed on rank 0: ValueError: only one class present": lambda t, m, b: {
        "x": unipar.gathered(b[0], score=_bad_score)
    },
    "metrics()['x'] came to values of the shape (10, 1); return one number, or a mapping of names to numbers": (
        lambda t, m, b: {"x": unipar.gathered(b[0], score=_itself)}
    ),
    "metrics()['x'] came to None; return one number, or a mapping of names to numbers": lambda t, m, b: {
        "x": unipar.gathered(b[0], score=_nothing)
    },
    "metrics()['x'] is another Metric object than in the batch before: make it once, in the task's __init__, so that "
    "it holds all batches": lambda t, m, b: {"x": MeanMetric()},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_refused(tmp_path: Path, message: str) -> None:
    """Each mistake is a sentence with the metric's name and the way out."""
    assert _refused(tmp_path, REFUSED[message]) == message


def test_gathered_needs_a_column() -> None:
    """Else there is nothing to score."""
    with pytest.raises(TypeError) as e:
        unipar.gathered(score=_two)
    assert str(e.value) == "gathered() takes at least one column, such as predictions and targets"
