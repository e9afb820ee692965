"""Features of samples, which a loss across the batch compares: their columns, checked, and the features again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self, final

from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from unipar.errors import TaskError


@final
@dataclass(frozen=True)
class FeatureColumns:
    """Tensors of what `Task.features` returned, each with one row for each sample, and how they were nested."""

    columns: Sequence[Tensor]
    nesting: TreeSpec

    @classmethod
    def of(cls, features: Any, samples: int | None = None) -> Self:
        """Return the columns; raise TaskError unless all are tensors of as many rows as the batch has samples."""
        columns, nesting = tree_flatten(features)
        for column in columns:
            if not isinstance(column, Tensor):
                raise TaskError(
                    f"features() returned a {type(column).__name__}; return tensors with one row for each sample of "
                    "the batch, alone or in lists, tuples and dicts"
                )
        rows = len(columns[0]) if columns and columns[0].ndim else 0
        expected = rows if samples is None else samples
        for column in columns:
            if column.ndim == 0 or len(column) != expected:
                raise TaskError(
                    f"features() returned a tensor of shape {tuple(column.shape)} for a batch of {expected} samples; "
                    "return one row for each sample (of a single number, such as a trained temperature: expand it to "
                    "as many rows, or multiply it into the features)"
                )
        if not columns:
            raise TaskError("features() returned no tensor; return those that loss_across(features) compares")
        return cls(columns, nesting)

    def nest(self, columns: Sequence[Tensor]) -> Any:
        """Return other columns, nested as these; floating-point ones in fp32 or fp64, in which the loss is computed."""
        return tree_unflatten([widen_features(column) for column in columns], self.nesting)


def widen_features(column: Tensor) -> Tensor:
    """Return a floating-point tensor in fp32 or fp64; any other as it is."""
    return column.float() if column.is_floating_point() and column.itemsize < 4 else column


def check_across_loss(loss: object) -> Tensor:
    """Return what `Task.loss_across` returned; raise TaskError unless that is a scalar tensor."""
    if not isinstance(loss, Tensor) or loss.ndim:
        shown = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
        raise TaskError(f"loss_across() returned {shown}; return the loss of the full batch as a scalar tensor")
    return loss
