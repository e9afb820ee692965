"""Choice of the parameters that an optimizer by whole matrices updates; the rest is AdamW's."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Literal

from torch import nn

from unipar.errors import TaskError
from unipar.utils.text import first_few


def matrix_names(
    module: nn.Module, only: Literal["auto"] | Sequence[str] = "auto", without: Sequence[str] = ()
) -> frozenset[str]:
    """Return the names of the trained parameters that are updated as matrices.

    auto: those of two dimensions, except an embedding's, and the head's: those of the last module that has such a
    parameter, whether it is trained or not. `only` and `without` are patterns of names.
    """
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    matrices = [name for name, p in trained.items() if p.ndim == 2]
    if only == "auto":
        left_out = _embeddings_and_head(module)
        chosen = [name for name in matrices if id(trained[name]) not in left_out]
    else:
        for pattern in only:
            matching = _matching(trained, [pattern])
            if other := [name for name in matching if trained[name].ndim != 2 and pattern == name]:
                raise TaskError(
                    f"train.optimizer.matrices: {other[0]} has {trained[other[0]].ndim} dimensions, and a matrix has 2"
                )
            if not set(matching) & set(matrices):
                raise TaskError(
                    f"train.optimizer.matrices: {pattern!r} matches none of the model's trained weights of two "
                    f"dimensions, {first_few(matrices, most=4)}"
                )
        chosen = _matching(matrices, only)
    for pattern in without:
        if not _matching(trained, [pattern]):
            raise TaskError(
                f"train.optimizer.adamw_for: {pattern!r} matches none of the model's trained parameters, "
                f"{first_few(list(trained), most=4)}"
            )
    return frozenset(chosen) - frozenset(_matching(chosen, without))


def _matching(names: Sequence[str] | dict[str, nn.Parameter], patterns: Sequence[str]) -> list[str]:
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


def _embeddings_and_head(module: nn.Module) -> set[int]:
    """Return the ids of the weights of two dimensions of embeddings, and of the last module that has any."""
    embeddings: set[int] = set()
    head: set[int] = set()
    for inner in module.modules():
        own = {id(p) for p in inner.parameters(recurse=False) if p.ndim == 2}
        if isinstance(inner, nn.Embedding | nn.EmbeddingBag):
            embeddings |= own
        head = own or head
    return embeddings | head
