"""Embedding and head cut over the vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn

from unipar.errors import TaskError
from unipar_mesh.sequence.sequence_parts import joined
from unipar_mesh.tensor.cut_logits import compute_on_words
from unipar_mesh.tensor.cuts import Cut, ParameterCut
from unipar_mesh.tensor.sum_collectives import enter, leave


@dataclass(frozen=True)
class Vocabulary:
    """Matrices of a model with one row for each word."""

    words: int
    embedding: str
    """Name of the module that reads words."""

    head: str
    """Name of the linear layer that scores words."""


def find_vocabulary(model: nn.Module, blocks: Sequence[str], ranks: int) -> Vocabulary:
    """Return a model's embedding and head, or raise TaskError if this many ranks cannot cut them."""
    outside = {n: m for n, m in model.named_modules() if not any(n == b or n.startswith(f"{b}.") for b in blocks)}
    tables = {n: m for n, m in outside.items() if isinstance(m, nn.Embedding)}
    heads = {n: m for n, m in outside.items() if type(m) is nn.Linear}
    pairs = [(n, h) for n, m in tables.items() for h, head in heads.items() if head.out_features == m.num_embeddings]
    if len(pairs) != 1:
        raise TaskError(
            f"a split vocabulary needs one embedding and one linear layer with as many outputs outside the blocks; the "
            f"model has {len(pairs)} such pairs: leave the option out"
        )
    embedding, head = pairs[0]
    table = tables[embedding]
    if table.num_embeddings % ranks:
        more = -(-table.num_embeddings // ranks) * ranks
        raise TaskError(
            f"a split vocabulary: {ranks} ranks do not divide the {table.num_embeddings} words of {embedding}; make it "
            f"{more} or leave the option out"
        )
    if table.max_norm is not None or table.scale_grad_by_freq or table.sparse:
        raise TaskError(
            f"a split vocabulary: {embedding} has max_norm, scale_grad_by_freq or sparse, which look at all words; "
            "leave them or the option out"
        )
    return Vocabulary(table.num_embeddings, embedding, head)


def cut_vocabulary(model: nn.Module, vocabulary: Vocabulary, ranks: int) -> dict[str, ParameterCut]:
    """Return how the parameters of embedding and head are cut, by name in the model; tied ones under both names."""
    cuts: dict[str, ParameterCut] = {}
    for name in (vocabulary.embedding, vocabulary.head):
        for key, p in model.get_submodule(name).named_parameters():
            cuts[f"{name}.{key}"] = ParameterCut(tuple(p.shape), 0, Cut("column"), ranks)
    return cuts


def arm_vocabulary(model: nn.Module, vocabulary: Vocabulary, group: dist.ProcessGroup) -> Callable[[], None]:
    """Make embedding and head, whose parameters are this rank's words already, compute what the whole ones do.

    The head's output is this rank's logits, which know that they are a part. Returns what takes it back.
    """
    table: Any = model.get_submodule(vocabulary.embedding)
    head: Any = model.get_submodule(vocabulary.head)
    each = vocabulary.words // dist.get_world_size(group)
    compute_on_words(table, head, each, group, lambda x: enter(joined(x), group), lambda x: leave(x, group))

    def undo() -> None:
        del table.__dict__["forward"], head.__dict__["forward"]

    return undo
