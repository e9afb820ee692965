"""Batches of a budget of tokens: filled in the order of the epoch, cut into microbatches of like lengths."""

from __future__ import annotations

import random
from itertools import islice
from typing import Any

import pytest

from unipar.config.sections.batch import Batch, BatchSizes
from unipar.data.lengths import SampleLengths
from unipar.data.order import DataPosition
from unipar.data.token_order import TokenOrder, consecutive_microbatches, split_by_tokens
from unipar.data.token_split import padded_tokens
from unipar.errors import ConfigError, TaskError

LENGTHS = [3, 1, 4, 1, 5, 2, 6, 5, 3, 5]


def _order(tokens: int = 10, *, last_batch: str = "keep", shuffle: bool = False, **more: Any) -> TokenOrder:
    return TokenOrder(SampleLengths(LENGTHS, int), tokens, 7, shuffle=shuffle, last_batch=last_batch, **more)


def _sizes(ranks: int, **batch: Any) -> BatchSizes:
    return Batch.model_validate({"tokens": 400, **batch}).settle(ranks)


def _many(seed: int, count: int = 90, most: int = 30) -> list[int]:
    draw = random.Random(seed)
    return [draw.randint(1, most) for _ in range(count)]


def test_batches_hold_as_many_samples_as_fit() -> None:
    """Ten samples of 35 tokens are five batches of at most ten; the next epoch begins anew."""
    batches = [batch for _, batch in islice(_order().batches(0), 6)]
    assert batches == [[0, 1, 2, 3], [4, 5], [6], [7, 8], [9], [0, 1, 2, 3]]
    order = _order()
    assert [order.position(n)[1:] for n in range(7)] == [(0, 0), (0, 4), (0, 6), (0, 7), (0, 9), (1, 0), (1, 4)]
    assert [order.place(n) for n in (0, 4, 5, 6)] == [(0, 0), (0, 4), (1, 0), (1, 1)]
    assert [order.size(n) for n in (0, 1, 2, 4, 5)] == [4, 2, 1, 1, 4]
    assert order.steps(3) == 15


def test_an_epoch_has_as_many_batches_as_its_order_makes() -> None:
    """Shuffled epochs have different numbers of batches, and the steps of several are their sum."""
    order = _order(shuffle=True)
    batches = order.batches(0)
    counts = [0] * 8
    while (entry := next(batches))[0] < 8:
        counts[entry[0]] += 1
    assert len(set(counts)) > 1
    assert [order.steps(n) for n in range(1, 9)] == [sum(counts[:n]) for n in range(1, 9)]
    late = _order(shuffle=True).batches(sum(counts[:5]) + 2)
    whole = islice(_order(shuffle=True).batches(0), sum(counts[:5]) + 2, None)
    assert list(islice(late, 9)) == list(islice(whole, 9))


def test_another_budget_goes_on_where_the_run_stopped() -> None:
    """After two batches of ten tokens, batches of twelve read the other four samples, then whole epochs."""
    begin = _order().position(2)
    assert begin == DataPosition(2, 0, 6)
    new = _order(12).go_on_from(begin)
    assert [batch for _, batch in islice(new.batches(2), 4)] == [[6, 7], [8, 9], [0, 1, 2, 3], [4, 5]]
    assert [new.position(n) for n in (2, 3, 4, 5)] == [
        DataPosition(2, 0, 6),
        DataPosition(3, 0, 8),
        DataPosition(4, 1, 0),
        DataPosition(5, 1, 4),
    ]
    assert [new.size(n) for n in (2, 3, 4)] == [2, 2, 4]
    assert new.steps(2) == 2 + 2 + 4


def test_the_last_batch_is_dropped_if_another_sample_would_have_fitted() -> None:
    """The last one has 8 tokens and the longest sample 6: with a budget of 15 it is left out, with 11 it counts."""
    assert _epoch(_order(15)) == [[0, 1, 2, 3, 4], [5, 6, 7], [8, 9]]
    assert _epoch(_order(15, last_batch="drop")) == [[0, 1, 2, 3, 4], [5, 6, 7]]
    assert _epoch(_order(11, last_batch="drop")) == [[0, 1, 2, 3], [4, 5], [6, 7], [8, 9]]


def _epoch(order: TokenOrder) -> list[list[int]]:
    return [batch for _, batch in islice(order.batches(0), order.per_epoch)]


@pytest.mark.parametrize(
    ("lengths", "last_batch", "kind", "sentence"),
    [
        ([], "weigh", TaskError, "data() has no samples"),
        (
            LENGTHS,
            "error",
            ConfigError,
            "data.last_batch: error: batches of at most 100 tokens (batch.tokens) are rarely full; choose keep or drop",
        ),
        (
            LENGTHS,
            "drop",
            ConfigError,
            "data.last_batch: drop leaves nothing: 10 samples have 35 tokens, and do not fill one batch of 100 "
            "(batch.tokens)",
        ),
    ],
)
def test_what_leaves_no_batches(lengths: list[int], last_batch: str, kind: type[Exception], sentence: str) -> None:
    """No samples, `error`, and `drop` of everything are refused with the numbers."""
    with pytest.raises(kind) as e:
        TokenOrder(SampleLengths(lengths, int), 100, 0, shuffle=True, last_batch=last_batch)
    assert str(e.value) == sentence


def test_microbatches_of_like_lengths() -> None:
    """At most 12 padded tokens each: the samples by length, and the largest one halved for the second rank."""
    parts = split_by_tokens(range(10), LENGTHS, _sizes(1, micro=12))
    assert [part for (part,) in parts] == [[6, 4], [7, 9], [2, 0, 8], [5, 1, 3]]
    two = split_by_tokens(range(7), LENGTHS, _sizes(2, micro=12))
    assert two == [[[6, 4], [2, 0]], [[5, 1, 3], []]] or all(part for micro in two for part in micro)


@pytest.mark.parametrize("rows", ["padded", "packed"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_every_cut_holds_each_sample_once(ranks: int, rows: str) -> None:
    """On any number of ranks each sample is in one microbatch, none is above `micro`, and none is empty."""
    for seed in range(20):
        lengths = _many(seed)
        packed = rows == "packed"
        for batch in ({"micro": 64}, {"accumulate": 3}):
            cut = split_by_tokens(range(90), lengths, _sizes(ranks, rows=rows, **batch))
            parts = [part for micro in cut for part in micro]
            assert sorted(i for part in parts for i in part) == list(range(90))
            assert {len(micro) for micro in cut} == {ranks}
            assert all(parts)
            if "micro" in batch:
                assert max(padded_tokens(part, lengths, packed=packed) for part in parts) <= 64
            else:
                assert len(cut) == 3


def test_microbatches_are_even() -> None:
    """Two microbatches on each of two ranks differ little in padded tokens, and those at one time in length."""
    lengths = _many(3)
    cut = split_by_tokens(range(90), lengths, _sizes(2, accumulate=2))
    padded = [[padded_tokens(part, lengths, packed=False) for part in micro] for micro in cut]
    assert padded == [[480, 468], [480, 416]]
    packed = split_by_tokens(range(90), lengths, _sizes(2, accumulate=2, rows="packed"))
    assert [[padded_tokens(part, lengths, packed=True) for part in micro] for micro in packed] == [
        [381, 381],
        [380, 380],
    ]


def test_more_ranks_than_samples() -> None:
    """Two samples on four ranks: the others have none, and all have one microbatch."""
    assert split_by_tokens([4, 6], LENGTHS, _sizes(4, micro=12)) == [[[6], [4], [], []]]


def test_batches_of_an_evaluation_stay_in_order() -> None:
    """Samples one after another, as many as fit into 12 tokens with padding, or without."""
    assert list(consecutive_microbatches(LENGTHS, 12, packed=False)) == [
        range(3),
        range(3, 5),
        range(5, 7),
        range(7, 9),
        range(9, 10),
    ]
    assert list(consecutive_microbatches(LENGTHS, 12, packed=True)) == [
        range(4),
        range(4, 6),
        range(6, 8),
        range(8, 10),
    ]
