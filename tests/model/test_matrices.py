"""Which parameters are matrices, by the rule and by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from torch import nn

from unipar.config import Config
from unipar.errors import TaskError
from unipar.model.matrices import matrix_names
from unipar.model.parameter_groups import parameter_groups


class _Model(nn.Module):
    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.norm = nn.LayerNorm(4)
        self.conv = nn.Conv1d(4, 4, 2)
        self.head = nn.Linear(4, 7)
        if tied:
            self.head.weight = self.embed.weight


BOTH = {"blocks.0.weight", "blocks.1.weight"}


def test_embeddings_and_the_head_are_left_out() -> None:
    """And what has one dimension, or three."""
    assert matrix_names(_Model()) == BOTH


def test_a_tied_head_takes_no_matrix_with_it() -> None:
    """The last module with a matrix is the head, though its weight is the embedding's."""
    assert matrix_names(_Model(tied=True)) == BOTH


def test_a_frozen_head_takes_no_matrix_with_it() -> None:
    """What trains before it is no head."""
    model = _Model()
    model.head.requires_grad_(requires_grad=False)
    assert matrix_names(model) == BOTH


def test_names() -> None:
    """By pattern, with others taken out."""
    assert matrix_names(_Model(), ["*"]) == {"embed.weight", "blocks.0.weight", "blocks.1.weight", "head.weight"}
    assert matrix_names(_Model(), ["blocks.*", "head.weight"], ["blocks.1.*"]) == {"blocks.0.weight", "head.weight"}


@pytest.mark.parametrize(
    ("only", "without", "message"),
    [
        (
            ["block.*"],
            [],
            "train.optimizer.matrices: 'block.*' matches none of the model's trained weights of two dimensions, "
            "embed.weight, blocks.0.weight, blocks.1.weight, head.weight",
        ),
        (["conv.weight"], [], "train.optimizer.matrices: conv.weight has 3 dimensions, and a matrix has 2"),
        (
            "auto",
            ["lm_head.*"],
            "train.optimizer.adamw_for: 'lm_head.*' matches none of the model's trained parameters, embed.weight, "
            "blocks.0.weight, blocks.0.bias, blocks.1.weight and 7 more",
        ),
    ],
)
def test_names_of_nothing(only: Any, without: list[str], message: str) -> None:
    """A pattern that matches nothing is an error."""
    with pytest.raises(TaskError) as caught:
        matrix_names(_Model(), only, without)
    assert str(caught.value) == message


def _groups(model: nn.Module, given: Any = None, **optimizer: Any) -> list[tuple[tuple[str, ...], Mapping[str, Any]]]:
    config = Config.model_validate(
        {"batch": {"total": 8}, "train": {"steps": 2, "optimizer": {"name": "muon", **optimizer}}}
    )
    return [(g.names, g.settings) for g in parameter_groups(model, config, given, own_optimizer=False)]


def test_matrices_have_groups_of_their_own() -> None:
    """AdamW's rate and decay are the section's, or those of the matrices."""
    mlp = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3), nn.Linear(3, 1))
    rest = ("0.bias", "1.bias", "2.weight", "2.bias")
    assert _groups(mlp) == [(("0.weight", "1.weight"), {"matrices": True}), (rest, {"matrices": False})]
    (matrices, _), (others, settings) = _groups(mlp, adamw={"lr": 3e-4, "weight_decay": 0.5}, adamw_for=["0.*"])
    assert (matrices, others) == (("1.weight",), ("0.weight", *rest))
    assert settings == {"lr": 3e-4, "weight_decay": 0.5, "matrices": False}


def test_groups_of_the_task_are_parted() -> None:
    """A group's own rate is that of its matrices and of the rest; a group may have none of them."""
    mlp = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3), nn.Linear(3, 1))
    given = [
        {"params": mlp[0].parameters(), "matrices": False},
        {"params": [*mlp[1].parameters(), *mlp[2].parameters()], "lr": 0.5},
    ]
    assert _groups(mlp, given, adamw={"lr": 3e-4}) == [
        (("0.weight", "0.bias"), {"lr": 3e-4, "matrices": False}),
        (("1.weight",), {"lr": 0.5, "matrices": True}),
        (("1.bias", "2.weight", "2.bias"), {"lr": 0.5, "matrices": False}),
    ]


def test_a_model_without_matrices_is_refused() -> None:
    """Muon would be AdamW under another name."""
    with pytest.raises(TaskError) as caught:
        _groups(nn.Sequential(nn.Embedding(5, 2), nn.Linear(2, 1)))
    assert str(caught.value) == (
        "train.optimizer.name: muon finds no matrix to update: of weights of two dimensions, it leaves embeddings and "
        "the last one, the head, to AdamW; name them (train.optimizer.matrices), or take adamw"
    )
