"""A task whose metrics are no means, and the same by scikit-learn on one process, for the conformance suite."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from sklearn.metrics import f1_score, roc_auc_score
from torch import Tensor
from torchmetrics import MetricCollection
from torchmetrics.classification import BinaryAUROC, MulticlassF1Score, MulticlassRecall
from typing_extensions import override

import unipar
from tests.conformance import tasks


def _low(logits: Tensor) -> Tensor:
    """How likely the next token is one of the first half of the vocabulary."""
    return logits.float().softmax(-1)[..., : tasks.V // 2].sum(-1)


def f1_of(predicted: Tensor, targets: Tensor) -> float:
    return float(f1_score(targets.flatten(), predicted.flatten(), average="macro"))


def _exact_and_first(predicted: list[list[int]], targets: list[list[int]]) -> dict[str, float]:
    """How many sentences of ragged length are right in the first tokens; and a number that depends on order."""
    right = [p == t for p, t in zip(predicted, targets, strict=True)]
    place = sum(i * sum(p) for i, p in enumerate(predicted))
    return {"match": float(np.mean(right)), "in order": float(place)}


def _own_tokens(tokens: Tensor, lengths: Tensor) -> list[list[int]]:
    return [row[: int(n)].tolist() for row, n in zip(tokens, lengths, strict=True)]


class Scored(tasks.Plain):
    """F1, area under the curve and exact matches, of 21 samples: most worlds have ranks with fewer than others."""

    def __init__(self) -> None:
        super().__init__()
        self.auc = BinaryAUROC()
        self.several = MetricCollection(
            [MulticlassF1Score(tasks.V, average="macro"), MulticlassRecall(tasks.V, average="micro")]
        )

    @override
    def metrics(self, model: Any, batch: tasks.Batch) -> Mapping[str, Any]:
        logits, targets = model(batch.tokens[:, :-1]), batch.tokens[:, 1:]
        predicted = logits.argmax(-1)
        self.auc.update(_low(logits), (targets < tasks.V // 2).long())
        self.several.update(predicted, targets)
        columns = _own_tokens(predicted, batch.lengths), _own_tokens(targets, batch.lengths)
        return {
            "auc": self.auc,
            "f1": unipar.gathered(predicted, targets, score=f1_of),
            "sentences": unipar.gathered(*columns, score=_exact_and_first),
            "several": self.several,
            "right": (predicted == targets).double().mean(),
        }

    def by_scikit_learn(self, model: Any, batch: tasks.Batch) -> dict[str, float]:
        """Return the same numbers of all samples at once."""
        logits, targets = model(batch.tokens[:, :-1]), batch.tokens[:, 1:]
        predicted = logits.argmax(-1)
        right = float((predicted == targets).double().mean())
        columns = _own_tokens(predicted, batch.lengths), _own_tokens(targets, batch.lengths)
        return {
            "auc": float(roc_auc_score((targets < tasks.V // 2).flatten(), _low(logits).flatten())),
            "f1": f1_of(predicted, targets),
            **{f"sentences/{key}": value for key, value in _exact_and_first(*columns).items()},
            "several/MulticlassF1Score": f1_of(predicted, targets),
            "several/MulticlassRecall": right,
            "right": right,
        }
