"""Samples of a map-style dataset: each once an epoch, in one order for all worlds; DataLoaders used or refused."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

from unipar.config import BatchSizes, Config
from unipar.data.dataset import DataSource, data_source_of
from unipar.data.microbatch_loader import MicrobatchLoader
from unipar.data.order import MicrobatchPlan, SampleOrder, split_batch
from unipar.errors import ConfigError, TaskError

DATA = TensorDataset(torch.arange(10))


def _order(samples: int = 10, total: int = 4, last_batch: str = "keep", *, shuffle: bool = True) -> SampleOrder:
    return SampleOrder(samples, total, seed=0, shuffle=shuffle, last_batch=last_batch)


def _config(**sections: Any) -> Config:
    return Config.model_validate({"batch": {"total": 4}, "train": {"steps": 1}, **sections})


def _source(given: Any, **sections: Any) -> DataSource:
    return data_source_of(given, None, default_collate, _config(**sections), BatchSizes(4, 2, 1, 2))


def _plans(ranks: int, micro: int, steps: int) -> list[list[list[MicrobatchPlan]]]:
    """Return the plans of a world as [rank][step][microbatch]."""
    sizes = _config().model_copy().batch.model_copy(update={"micro": micro}).settle(ranks)
    made: list[list[list[MicrobatchPlan]]] = []
    for rank in range(ranks):
        plans = MicrobatchLoader(_source(DATA), sizes, rank, 0).plans(0)
        made.append([next(plans) for _ in range(steps)])
    return made


def test_every_sample_once_an_epoch() -> None:
    """Ten samples are read once an epoch, in batches of at most four; epochs differ in order."""
    batches = _order().batches(0)
    first = [i for _ in range(3) for i in next(batches)[1]]
    second = [i for _ in range(3) for i in next(batches)[1]]
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second


def test_order_is_seed_and_epoch_alone() -> None:
    """A run that starts at step 4 reads what a whole run reads from step 4 on."""
    whole = _order().batches(0)
    skipped = [next(whole) for _ in range(7)][4:]
    late = _order().batches(4)
    assert [next(late) for _ in range(3)] == skipped


def test_without_shuffling() -> None:
    """Samples come in the dataset's order if they are not shuffled."""
    batches = _order(shuffle=False).batches(0)
    assert [next(batches) for _ in range(4)] == [(0, [0, 1, 2, 3]), (0, [4, 5, 6, 7]), (0, [8, 9]), (1, [0, 1, 2, 3])]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_worlds_train_on_the_same_global_batches(ranks: int) -> None:
    """Worlds of 1, 2 and 4 read the same samples in each step, and weights add up to one."""
    whole = _order().batches(0)
    for step in zip(*_plans(ranks, 1, 6), strict=True):
        epoch, batch = next(whole)
        plans = [plan for rank in step for plan in rank]
        read = sorted(i for plan in plans if plan.weight for e, i in plan.keys if e == epoch)
        assert read == sorted(batch)
        assert sum(plan.weight for plan in plans) == pytest.approx(1.0, abs=1e-15)


def test_an_empty_microbatch_is_a_real_sample_of_weight_zero() -> None:
    """Two ranks without a sample read one that does not count."""
    last = [rank[2] for rank in _plans(4, 1, 3)]
    assert [plan.weight for (plan,) in last] == [0.5, 0.5, 0.0, 0.0]
    assert all(len(plan.keys) == 1 for (plan,) in last)


def test_each_rank_knows_the_sizes_of_all_ranks() -> None:
    """Nobody has to ask the others how a global batch of four, or the last one of two, was cut."""
    ranks = _plans(4, 1, 3)
    assert [[plan.of_ranks for plan in step] for rank in ranks for step in rank] == 4 * [
        [[1, 1, 1, 1]], [[1, 1, 1, 1]], [[1, 1, 0, 0]]
    ]  # fmt: skip


def test_cut() -> None:
    """Parts of a batch of seven differ in size by at most one."""
    assert split_batch(list(range(7)), 2, 2) == [[[0, 1], [2, 3]], [[4, 5], [6]]]


@pytest.mark.parametrize(("last_batch", "batches"), [("weigh", 3), ("drop", 2)])
def test_ragged_epochs(last_batch: str, batches: int) -> None:
    """Ten samples in batches of four are three steps, or two with `drop`."""
    assert _order(last_batch=last_batch).per_epoch == batches


def test_ragged_error_shows_the_arithmetic() -> None:
    """`data.last_batch: error` refuses samples that do not fill all batches, with the numbers."""
    with pytest.raises(ConfigError) as e:
        _order(last_batch="error")
    assert str(e.value) == (
        "data.last_batch: 10 samples are 2 batches of 4 and 2 left over; choose keep or drop, or another batch.total"
    )


def test_dropping_everything_is_refused() -> None:
    """`data.last_batch: drop` is refused if it leaves no batch."""
    with pytest.raises(
        ConfigError,
        match=r"^data.last_batch: drop leaves nothing: 3 samples do not fill one batch of 4; choose keep, or "
        r"a smaller batch.total$",
    ):
        _order(samples=3, last_batch="drop")


def test_no_samples() -> None:
    """An empty dataset is refused."""
    with pytest.raises(TaskError, match=r"^data\(\) has no samples$"):
        _order(samples=0)


def test_a_loader_is_taken() -> None:
    """A DataLoader's dataset, collate_fn, workers, shuffling and drop_last are used."""
    dataloader = DataLoader(
        DATA, batch_size=2, shuffle=True, num_workers=2, drop_last=True, collate_fn=_collate, timeout=5
    )
    source = _source(dataloader)
    assert source.dataset is DATA
    assert source.collate is _collate
    assert (source.settings.shuffle, source.settings.workers, source.settings.last_batch) == (True, 2, "drop")
    assert source.loader_arguments["timeout"] == 5


def test_a_key_in_the_file_wins_over_the_loader() -> None:
    """Keys in the config override the DataLoader's shuffling and workers."""
    dataloader = DataLoader(DATA, batch_size=4, shuffle=True, num_workers=2)
    settings = _source(dataloader, data={"shuffle": False, "workers": 0}).settings
    assert (settings.shuffle, settings.workers) == (False, 0)


def _collate(samples: list[Any]) -> Any:
    return samples


def test_a_collate_fn_beside_the_tasks_collate() -> None:
    """Two functions that make batches contradict each other; the task's own in the dataloader is one."""
    dataloader = DataLoader(DATA, batch_size=4, collate_fn=_collate)
    sizes = BatchSizes(4, 2, 1, 2)
    assert data_source_of(dataloader, _collate, default_collate, _config(), sizes).collate is _collate
    with pytest.raises(TaskError) as e:
        data_source_of(dataloader, list, default_collate, _config(), sizes)
    assert str(e.value) == (
        "the DataLoader has a collate_fn of its own, and the task has collate(samples): leave one of them out"
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (DataLoader(DATA, batch_size=3),
         "the DataLoader's batch_size is 3; it must be batch.total (4), batch.micro (2) or unset"),
        (DataLoader(DATA, batch_sampler=BatchSampler(SequentialSampler(DATA), 4, drop_last=False)),
         "the DataLoader has a batch_sampler of its own; unipar decides which samples are a batch: give batch_size "
         "instead"),
        (DataLoader(DATA, batch_size=None),
         "the DataLoader has batch_size=None; unipar decides which samples are a batch: give batch_size instead"),
        (DataLoader(DATA, generator=torch.Generator()),
         "the DataLoader has a generator of its own; the order follows from train.seed: leave it out"),
        (7, "data() returned int; it must return a dataset with __getitem__ and __len__, a stream, or a DataLoader"),
    ],
)  # fmt: skip
def test_what_cannot_be_taken_is_refused(given: Any, message: str) -> None:
    """A DataLoader with settings that unipar cannot use is refused, with the way out."""
    with pytest.raises(TaskError) as e:
        _source(given)
    assert str(e.value) == message


def test_a_spare_is_a_sample_that_weighs() -> None:
    """A rank whose microbatches have no weight computes the first sample that has some."""
    loader = MicrobatchLoader(_source(DATA), BatchSizes(4, 2, 1, 2), 0, 0)
    assert loader.batch_with_weight(lambda batch: float(batch[0] > 3))[0].item() == 4
    with pytest.raises(TaskError, match=r"^weight\(batch\) is 0 for every single sample of the data"):
        loader.batch_with_weight(lambda batch: 0.0)


def _drawn(batch: list[Any]) -> float:
    return random.random() + torch.rand(()).item() + np.random.rand()


def test_a_collate_that_draws() -> None:
    """A task's own collate draws by the batch's last sample, though its samples are only looked up."""
    loader = MicrobatchLoader(replace(_source(DATA), collate=_drawn), BatchSizes(4, 2, 1, 2), 0, 0)
    assert loader.read([(0, 1), (0, 5)]) == loader.read([(0, 2), (0, 5)]) != loader.read([(0, 5), (0, 1)])


def test_nothing_that_draws() -> None:
    """No generator is seeded where samples are only looked up, and PyTorch's own collate puts them together."""
    loader = MicrobatchLoader(_source(DATA), BatchSizes(4, 2, 1, 2), 0, 0)
    before = random.getstate(), torch.get_rng_state().tolist()
    assert loader.read([(0, 1), (0, 5)])[0].tolist() == [1, 5]
    assert (random.getstate(), torch.get_rng_state().tolist()) == before
