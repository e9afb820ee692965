"""Exchange of positions for heads: copies of key heads, bytes beside gathering, and when auto takes it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from unipar_mesh.context.head_exchange import bytes_beside_gathering, copies_of_key_heads, why_no_exchange
from unipar_mesh.context.sequence_layout import SequenceLayout
from unipar_mesh.context.spread_attention import choose_way

from tests.support.short_text import short_text
from tests.support.world import ROOT
from unipar.backend import registry
from unipar.config.config_source import load_given_config
from unipar.training.task_facts import describe_split

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, while it is imported


@pytest.mark.parametrize(
    ("key_heads", "ranks", "copies"), [(8, 2, 1), (2, 2, 1), (2, 4, 2), (1, 8, 8), (3, 2, 2), (6, 4, 2)]
)
def test_as_few_copies_of_key_heads_as_ranks_need(key_heads: int, ranks: int, copies: int) -> None:
    assert copies_of_key_heads(key_heads, ranks) == copies


def test_heads_that_ranks_do_not_divide() -> None:
    assert why_no_exchange(12, 4) == ""
    assert why_no_exchange(14, 4) == "14 heads of queries cannot be divided evenly among 4 ranks of parallel.context"


@pytest.mark.parametrize(
    ("heads", "key_heads", "ranks", "element_size", "share"),
    [
        (8, 8, 2, 4, 2 / 3),  # 4 tensors once in each direction, of which half is sent; 2 gathered three times
        (8, 8, 4, 4, 1 / 3),
        (8, 8, 2, 2, 1 / 2),  # gradients of what was gathered are summed in fp32
        (8, 2, 2, 4, 5 / 3),
        (8, 2, 8, 4, 2 / 3),  # each of 2 heads of keys goes to 4 ranks
    ],
)
def test_bytes_beside_those_of_gathering(
    heads: int, key_heads: int, ranks: int, element_size: int, share: float
) -> None:
    """Heads that share keys make less to gather, and more ranks make less to exchange."""
    assert bytes_beside_gathering(heads, key_heads, ranks, element_size) == pytest.approx(share)


@pytest.mark.parametrize(
    ("heads", "key_heads", "given", "way"),
    [
        (4, 4, {}, "ulysses"),
        (4, 2, {}, "gather"),  # as many bytes
        (4, 1, {}, "gather"),
        (3, 3, {}, "gather"),
        (4, 4, {"dropout": 0.1}, "gather"),
        (4, 4, {"masked": True, "by_heads": False}, "gather"),  # rows of a mask would have to be gathered
    ],
)
def test_what_auto_takes(heads: int, key_heads: int, given: dict[str, Any], way: str) -> None:
    """On the CPU heads are exchanged where ranks divide them and fewer bytes are sent than by gathering."""
    q, k = (torch.empty(1, number, 8, 16) for number in (heads, key_heads))
    asked: dict[str, Any] = {"causal": True, "masked": False, "dropout": 0.0, "by_heads": True}
    assert choose_way(q, k, k, SequenceLayout(16, 2, 0), name="layers.0", **(asked | given)) == way


def _short_text(heads: int) -> dict[str, Any]:
    task = short_text(layers=2)
    task["args"] |= {"heads": heads}
    return task


def _sentences(task: dict[str, Any], ranks: int, device: str = "cpu", attention: str = "auto") -> list[str]:
    config = load_given_config(
        {
            "task": task,
            "device": device,
            "parallel": {"data": 1, "context": ranks},
            "batch": {"total": 8},
            "train": {"steps": 1},
            "options": {"native": {"attention": attention}},
        }
    ).config
    return describe_split(config, config.batch.settle(1), registry.find_backend("native"))


@pytest.mark.parametrize(
    ("heads", "ranks", "device", "sentence"),
    [
        (
            2,
            2,
            "cpu",
            "auto is ulysses: with 2 heads of queries and 2 of keys on 2 ranks ulysses sends 0.67 times the bytes of "
            "gather",
        ),
        (
            2,
            4,
            "cuda",
            "auto is torch's ring where it can do it, else gather: 2 heads of queries cannot be divided evenly among 4 "
            "ranks of parallel.context",
        ),
    ],
)
def test_explain_tells_what_auto_takes(heads: int, ranks: int, device: str, sentence: str) -> None:
    """Found on the model without values: the same rule as in training, one sentence for each kind of block."""
    assert _sentences(_short_text(heads), ranks, device) == [f"attention of layers.0 and 1 more: {sentence}"]


@pytest.mark.parametrize("name", ["GPT2", "Encoder"])
def test_explain_tells_of_dropout(name: str) -> None:
    """Attention that has dropout is gathered by auto, whether the model calls it or torch's multi-head attention."""
    (sentence,) = _sentences({"use": f"{ROOT}/benchmarks/mesh_models.py:{name}"}, 2)
    assert sentence.partition(" and 3 more: ")[2] == "auto is gather: it has dropout (0.1)"


@pytest.mark.parametrize(
    ("attention", "sentences"),
    [
        (
            "ulysses",
            [
                "attention of layers.0 and 1 more: ulysses cannot do it: 2 heads of queries cannot be divided evenly "
                "among 4 ranks of parallel.context; say gather or ring"
            ],
        ),
        ("ring", []),
    ],
)
def test_explain_tells_what_ulysses_cannot_do(attention: str, sentences: list[str]) -> None:
    """Before anything runs; what auto would take is told only where auto chooses."""
    assert _sentences(_short_text(2), 4, attention=attention) == sentences
    assert _sentences(_short_text(2), 2, attention=attention) == []
