"""`gathered`: predictions of all validation samples, for a metric that is no mean over batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

Score = Callable[..., Any]
"""Function of whole columns: it returns a number, or a mapping of names to numbers."""


@final
@dataclass(frozen=True)
class Gathered:
    """One batch's rows of the columns from which a metric is computed when all batches are done."""

    columns: tuple[Any, ...]
    score: Score


def gathered(*columns: Any, score: Score) -> Gathered:
    """Return a metric for `Task.metrics` that is not a mean: `score(*columns)` over all validation samples, in order.

    Args:
        columns: Tensors or arrays whose first dimension runs over samples, or lists with one entry for each. They are
            collected from all ranks, without samples that a rank runs twice.
        score: Function of the collected columns; it is called once, on one rank.

    Returns:
        A value for the mapping that `metrics` returns.

    Raises:
        TypeError: There is no column.

    Examples:
        ```python
        import unipar


        def accuracy(guesses, targets):
            return (guesses == targets).float().mean().item()


        class Classifier(unipar.Task):
            ...

            def metrics(self, model, batch):
                x, y = batch
                return {"accuracy": unipar.gathered(model(x).argmax(1), y, score=accuracy)}
        ```
    """
    if not columns:
        raise TypeError("gathered() takes at least one column, such as predictions and targets")
    return Gathered(columns, score)
