"""A user's own sampler: its indices are the order of an epoch, drawn once, and divided as any other order."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import cycle, islice
from typing import Any

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from unipar.config import Config
from unipar.config.sections.batch import Batch
from unipar.data import sampler_order
from unipar.data.dataset import DataSource, data_source_of
from unipar.data.lengths import measure_lengths
from unipar.data.microbatch_loader import MicrobatchLoader
from unipar.data.sampler_order import SamplerOrder
from unipar.errors import ConfigError, TaskError

DATA = TensorDataset(torch.arange(10))


class _Told:
    """Sampler that gives these indices, epoch after epoch."""

    def __init__(self, *epochs: list[Any]) -> None:
        self.epochs, self.epoch, self.set = epochs, -1, list[int]()

    def set_epoch(self, epoch: int) -> None:
        self.set.append(epoch)

    def __iter__(self) -> Iterator[Any]:
        self.epoch += 1
        return iter(self.epochs[min(self.epoch, len(self.epochs) - 1)])

    def __len__(self) -> int:
        return len(self.epochs[0])


def _source(sampler: Any, **sections: Any) -> DataSource:
    config = Config.model_validate({"batch": {"total": 4}, "train": {"steps": 1}, **sections})
    return data_source_of(DataLoader(DATA, sampler=sampler), None, default_collate, config, config.batch.settle(1))


def _order(sampler: Any, seed: int = 0) -> SamplerOrder:
    return SamplerOrder(sampler, 10, seed)


def test_epochs_are_drawn_in_order_and_once() -> None:
    """Asking for the third epoch first draws the two before it; set_epoch is called for each."""
    told = _Told([1, 2], [3, 4], [5, 6])
    order = _order(told)
    assert (order(2), order(0), order(1), order.count) == ([5, 6], [1, 2], [3, 4], 2)
    assert told.set == [0, 1, 2]


@pytest.mark.parametrize(
    "sampler",
    [
        lambda: WeightedRandomSampler([1.0, 5.0] * 5, 12),
        lambda: WeightedRandomSampler([1.0, 5.0] * 5, 12, generator=torch.Generator().manual_seed(3)),
        lambda: RandomSampler(DATA, replacement=True, num_samples=7),
        lambda: _alone(),
        lambda: _Shuffled(),
    ],
)
def test_a_run_that_goes_on_draws_the_same(sampler: Any) -> None:
    """The order depends on seed and epoch alone, also by a generator of the sampler's own; the others are put back."""
    torch.manual_seed(5)
    random.seed(5)
    first = _order(sampler())
    drawn = [first(epoch) for epoch in range(3)]
    after = torch.rand(1).item(), random.random()
    torch.manual_seed(5)
    random.seed(5)
    assert after == (torch.rand(1).item(), random.random())
    again = _order(sampler())
    assert (again(2), again.digest(2)) == (drawn[2], first.digest(2))
    assert drawn[0] != drawn[1]


def _alone() -> Any:
    """Sampler that has set_epoch, and is not divided."""
    sampler: Any = DistributedSampler(DATA, num_replicas=1, rank=0)
    return sampler


class _Shuffled:
    """Sampler that draws by Python's generator."""

    def __iter__(self) -> Iterator[int]:
        indices = list(range(10))
        random.shuffle(indices)
        return iter(indices)

    def __len__(self) -> int:
        return 10


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_worlds_read_the_samplers_order(ranks: int) -> None:
    """Seven indices, of which two are the same sample: batches of four and of three, in every world."""
    told = [9, 0, 3, 3, 7, 1, 5]
    sizes = Batch(total=4, micro=1).settle(ranks)
    loaders = [MicrobatchLoader(_source(_Told(told)), sizes, rank, 0).plans(0) for rank in range(ranks)]
    for wanted in (told[:4], told[4:], told[:4]):
        plans = [plan for loader in loaders for plan in next(loader)]
        assert sorted(i for plan in plans if plan.weight for _, i in plan.keys) == sorted(wanted)
        assert sum(plan.weight for plan in plans) == pytest.approx(1.0, abs=1e-15)
        assert all(plan.repeats for plan in plans)
    loader = MicrobatchLoader(_source(_Told(told)), sizes, 0, 0)
    assert (loader.steps(3), loader.samples(1), loader.place(3)) == (6, 3, (1, 1))


def test_batches_of_tokens_follow_the_sampler() -> None:
    """As many indices in their order as fit into ten tokens."""
    told = [9, 0, 3, 3, 7, 1, 5]

    class _Task:
        def length(self, sample: Any) -> int:
            return int(sample[0]) + 1

        def defines(self, name: str) -> bool:
            return True

    sizes = Batch(tokens=10).settle(1)
    lengths = measure_lengths(_Task(), DATA, 0, sizes)
    loader = MicrobatchLoader(_source(_Told(told)), sizes, 0, 0, lengths=lengths)
    assert [batch for _, batch in islice(loader.order.batches(0), 5)] == [[9], [0, 3, 3], [7, 1], [5], [9]]
    assert loader.steps(2) == 8


@pytest.mark.parametrize(
    ("epochs", "sentence"),
    [
        (
            [[1, 10]],
            "the DataLoader's sampler (_Told) gave index 10 in epoch 1, and the dataset has 10 samples, 0 to 9: make "
            "the sampler for this dataset",
        ),
        (
            [[1, 2], [1, -1]],
            "the DataLoader's sampler (_Told) gave index -1 in epoch 2, and the dataset has 10 samples, 0 to 9: make "
            "the sampler for this dataset",
        ),
        (
            [[[1, 2]]],
            "the DataLoader's sampler (_Told) gave [1, 2] in epoch 1; it must give the index of one sample at a time, "
            "and unipar makes the batches",
        ),
        ([[]], "the DataLoader's sampler (_Told) gave no index in epoch 1; it must yield at least one"),
        (
            [[1, 2], [1, 2, 3]],
            "the DataLoader's sampler (_Told) gave 2 indices in epoch 1 and 3 in epoch 2: the steps of a run follow "
            "from the first, so it must give as many in each",
        ),
    ],
)
def test_what_is_no_order(epochs: list[Any], sentence: str) -> None:
    """An index beyond the data, lists, nothing, and epochs of unequal length are refused."""
    with pytest.raises(TaskError) as e:
        _order(_Told(*epochs))(1)
    assert str(e.value) == sentence


def test_a_sampler_without_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sampler without an end is refused after ten times the samples, unless its len() says that it gives more."""
    monkeypatch.setattr(sampler_order, "_LEAST_LIMIT", 20)
    with pytest.raises(TaskError) as e:
        _order(cycle(range(10)))(0)
    assert str(e.value) == (
        "the DataLoader's sampler (cycle) gave 100 indices of 10 samples in epoch 1, and goes on: let it end after an "
        "epoch (unipar begins the next one), or give it a len()"
    )
    assert len(_order([3] * 101)(0)) == 101


@pytest.mark.parametrize(
    ("mine", "how"), [([1, 2], "2 indices, and 3 indices on rank 0"), ([1, 2, 4], "other indices than on rank 0")]
)
def test_ranks_must_see_one_order(mine: list[int], how: str) -> None:
    """A sampler that is divided among ranks, or drawn apart, is refused on the rank that differs."""
    first = list[str]()
    SamplerOrder(_Told([1, 2, 3]), 10, 0, lambda text, _: first.append(text))(0)

    def agree(text: str, sentence: Any) -> None:
        if text != first[0]:
            raise TaskError(sentence(first[0]))

    SamplerOrder(_Told([1, 2, 3]), 10, 0, agree)(0)
    with pytest.raises(TaskError) as e:
        SamplerOrder(_Told(mine), 10, 0, agree)(0)
    assert str(e.value) == (
        f"the DataLoader's sampler (_Told) gave {how} in epoch 1: every rank must see the whole order, and unipar "
        "divides it: do not divide it among ranks (num_replicas=1, rank=0), and draw from the global generators, which "
        "are seeded by train.seed and the epoch"
    )


def test_the_order_is_said_once() -> None:
    """data.shuffle has no effect beside a sampler."""
    with pytest.raises(ConfigError) as e:
        _source(_Told([1]), data={"shuffle": True})
    assert str(e.value) == (
        "data.shuffle: true: the DataLoader has a sampler of its own (_Told), which gives the order; leave the key "
        "out, or the sampler"
    )
