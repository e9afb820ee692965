"""Batches that a script's loaders give, and epochs that repeat the one before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from unipar.observing.process.batch_record import FIRST_BATCHES, BatchRecord
from unipar.observing.process.script_checks import digest_batch, first_dimension

SAMPLES = TensorDataset(torch.arange(40.0).reshape(20, 2), torch.arange(20))


def loader_of(rank: int = 0, *, shuffle: bool = True, **more: Any) -> DataLoader[Any]:
    return DataLoader(SAMPLES, batch_size=2, sampler=DistributedSampler(SAMPLES, 2, rank, shuffle=shuffle), **more)


def read(record: BatchRecord, loader: DataLoader[Any], batches: int = 5) -> list[bool]:
    """Read an epoch as a script does, or its first batches."""
    record.begin_epoch(loader)
    return [record.add(batch) for batch, _ in zip(loader, range(batches), strict=False)]


def test_the_first_batches_are_kept() -> None:
    """Digests of three batches: equal for ranks that read the same ones, others for other samples."""
    records = [BatchRecord() for _ in range(3)]
    for record, loader in zip(records, (loader_of(0), loader_of(0), loader_of(1)), strict=True):
        read(record, loader)
    assert [len(record.first) for record in records] == [FIRST_BATCHES] * 3
    assert records[0].first == records[1].first
    assert records[0].first != records[2].first
    assert records[0].dimension == 2


def test_an_epoch_without_set_epoch() -> None:
    """The third batch of the second epoch says that it repeats the first one; with set_epoch it does not."""
    record, loader = BatchRecord(), loader_of()
    assert read(record, loader) == [False] * 5
    assert read(record, loader) == [False, False, True, False, False]
    loader.sampler.set_epoch(2)  # pyright: ignore[reportAttributeAccessIssue]
    assert read(record, loader) == [False] * 5


def test_a_sampler_that_does_not_shuffle() -> None:
    """The order of a sampler that does not shuffle is the same in each epoch, as it is meant."""
    record, loader = BatchRecord(), loader_of(shuffle=False)
    assert read(record, loader) + read(record, loader) == [False] * 10


def test_a_plain_loader() -> None:
    """A loader without a sampler for ranks is not compared with itself."""
    record, loader = BatchRecord(), DataLoader(SAMPLES, batch_size=2)
    assert read(record, loader) + read(record, loader) == [False] * 10


def test_an_evaluation_within_an_epoch() -> None:
    """After a loader that is read without gradients, the epoch of the other one goes on."""
    record, loader, evaluated = BatchRecord(), loader_of(), loader_of(1)
    found: list[bool] = []
    for _ in range(2):
        record.begin_epoch(loader)
        for number, batch in enumerate(loader):
            found.append(record.add(batch))
            if number == 0:
                with torch.no_grad():
                    record.begin_epoch(evaluated)
    assert found == [False] * 7 + [True] + [False] * 2


@pytest.mark.parametrize(
    ("batch", "first"),
    [
        (torch.zeros(3, 2), 3),
        ([torch.zeros(4), torch.zeros(2)], 4),
        ({"ids": torch.zeros(5, 2), "name": "a"}, 5),
        ({"outer": [{"ids": torch.zeros(6)}]}, 6),
        (torch.zeros(7, dtype=torch.float8_e4m3fn), 7),
        (torch.tensor(1.0), None),
        ("a", None),
        (torch.zeros(0), None),
    ],
)
def test_first_dimension_of_a_batch(batch: Any, first: int | None) -> None:
    """The first dimension is that of the first tensor in any nesting."""
    assert first_dimension(batch) == first
    assert (digest_batch(batch) is None) == (isinstance(batch, str) or (torch.is_tensor(batch) and not batch.numel()))


def test_a_batch_of_a_mapping_class() -> None:
    """A batch of transformers is a mapping with an attribute `data`; other numbers have another digest."""

    class Encoding:
        def __init__(self, ids: torch.Tensor) -> None:
            self.data = {"ids": ids}

    first, same, other = (digest_batch(Encoding(torch.tensor([n]))) for n in (1, 1, 2))
    assert first == same != other
