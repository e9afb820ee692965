"""Lengths of samples: each rank measures a part, none may be too long, and what is read later must be as long."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate
from typing_extensions import override

from unipar.config import BatchSizes, Config
from unipar.config.sections.batch import Batch
from unipar.data.dataset import DataSource, data_source_of, training_data_source
from unipar.data.lengths import SampleLengths, measure_lengths
from unipar.data.microbatch_loader import MicrobatchLoader
from unipar.errors import ConfigError, TaskError

TEXTS = ["one", "three", "eleven", "a", "seventeen"]


class _Counts:
    """Part of a task: the length of a text is its number of letters."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def length(self, sample: Any) -> Any:
        self.seen.append(sample)
        return len(sample) if isinstance(sample, str) else sample

    def defines(self, name: str) -> bool:
        return name == "length"


class _Uncounted(_Counts):
    @override
    def defines(self, name: str) -> bool:
        return False


def _sizes(**batch: Any) -> BatchSizes:
    return Batch.model_validate({"tokens": 20, **batch}).settle(1)


def _source(data: Any, sizes: BatchSizes) -> DataSource:
    config = Config.model_validate({"batch": {"tokens": 20}, "train": {"steps": 1}})
    return training_data_source(data, None, default_collate, config, sizes)


def _measured(data: Any, **batch: Any) -> SampleLengths:
    found = measure_lengths(_Counts(), data, 0, _sizes(**batch))
    assert found is not None
    return found


def test_each_rank_measures_a_part() -> None:
    """Rank 1 of 2 reads the second and the fourth sample; what the others found is added."""
    task, reported = _Counts(), list[tuple[int, int]]()
    others = torch.tensor([3, 0, 6, 0, 9])
    found = measure_lengths(
        task,
        TEXTS,
        0,
        _sizes(),
        share=(1, 2),
        add_up=lambda mine: mine + others,
        report=lambda done, of: reported.append((done, of)),
    )
    assert found is not None
    assert (list(found.of), found.longest, found.tokens([0, 4])) == ([3, 5, 6, 1, 9], 9, 12)
    assert task.seen == ["three", "a"]
    assert reported == [(0, 2), (1, 2)]


def test_batches_of_samples_need_no_lengths() -> None:
    """Nothing is read if the batch is counted in samples."""
    task = _Counts()
    assert measure_lengths(task, TEXTS, 0, Batch(total=4).settle(1)) is None
    assert task.seen == []


@pytest.mark.parametrize(
    ("batch", "sentence"),
    [
        (
            {"max_length": 5},
            "batch.max_length: 5: sample 2 of data() has 6 tokens, more than that, as 1 other of 5; cut or leave out "
            "such samples in the dataset, or raise batch.max_length to the longest one's 9",
        ),
        (
            {"tokens": 4},
            "batch.tokens: 4: sample 1 of data() has 5 tokens, more than that, as 2 others of 5; cut or leave out such "
            "samples in the dataset, or raise batch.tokens to the longest one's 9",
        ),
        (
            {"micro": 8},
            "batch.micro: 8: sample 4 of data() has 9 tokens, more than that; cut or leave out such samples in the "
            "dataset, or raise batch.micro to the longest one's 9",
        ),
    ],
)
def test_a_sample_that_is_too_long_is_named(batch: dict[str, Any], sentence: str) -> None:
    """Above `longest`, above the budget, and above a microbatch: the first one's index, and how many there are."""
    with pytest.raises(ConfigError) as e:
        _measured(TEXTS, **batch)
    assert str(e.value) == sentence


@pytest.mark.parametrize("length", [0, -1, 2.0, None, True])
def test_a_length_is_a_whole_number(length: Any) -> None:
    """What length(sample) returns is checked, with the sample's index."""
    with pytest.raises(TaskError) as e:
        _measured([3, length])
    assert str(e.value) == (f"length(sample) is {length!r} for sample 1 of data(); return a whole number above 0")


def test_a_tensor_of_one_number_is_a_length() -> None:
    """As a row of token counts gives it."""
    assert list(_measured([torch.tensor(3), 4]).of) == [3, 4]


def test_a_task_without_lengths() -> None:
    """`batch.tokens` needs length(sample)."""
    with pytest.raises(TaskError) as e:
        measure_lengths(_Uncounted(), TEXTS, 0, _sizes())
    assert str(e.value) == (
        "batch.tokens: 20: the task has no length(sample); define it, and let it return the number of tokens of a "
        "sample as the dataset gives it"
    )


class _Growing(Dataset[str]):
    """Texts that are longer each time they are read."""

    def __init__(self) -> None:
        self.reads = 0

    def __len__(self) -> int:
        return 2

    @override
    def __getitem__(self, index: int) -> str:
        self.reads += 1
        return "x" * self.reads


def test_a_sample_keeps_the_length_that_was_planned() -> None:
    """A dataset that draws another length at each read is refused with the sample's index."""
    data, sizes = _Growing(), _sizes()
    lengths = _measured(data)
    loader = MicrobatchLoader(_source(data, sizes), sizes, 0, 0, lengths=lengths)
    with pytest.raises(TaskError) as e:
        loader.read([(2, 1)])
    assert str(e.value) == (
        "batch.tokens: sample 1 of data() had 2 tokens when batches were planned, and has 3 in epoch 3: "
        "length(sample) must depend on the index alone; cut or pad samples to one length each where they are drawn at "
        "random"
    )


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_worlds_train_on_the_same_tokens(ranks: int) -> None:
    """In any world a step has the same samples, and the weights of its microbatches are shares of its tokens."""
    data = [str(10**i) for i in (0, 3, 1, 4, 1, 5, 2, 6, 4, 3, 5)]
    sizes = Batch(tokens=12, micro=8).settle(ranks)
    lengths = _measured(data)
    loaders = [
        MicrobatchLoader(_source(data, sizes), sizes, rank, 0, lengths=lengths).plans(0) for rank in range(ranks)
    ]
    alone = MicrobatchLoader(_source(data, sizes), Batch(tokens=12, micro=8).settle(1), 0, 0, lengths=lengths).plans(0)
    for _ in range(12):
        steps = [next(loader) for loader in loaders]
        assert len({len(step) for step in steps}) == 1
        plans = [plan for step in steps for plan in step]
        one = next(alone)
        assert sorted(key for plan in plans if plan.weight for key in plan.keys) == sorted(
            key for plan in one for key in plan.keys
        )
        whole = sum(len(data[i]) for plan in one for _, i in plan.keys)
        assert whole <= 12
        assert [plan.weight for plan in plans if plan.weight] == [
            sum(len(data[i]) for _, i in plan.keys) / whole for plan in plans if plan.weight
        ]
        assert {plan.of_tokens for plan in plans} == {whole}
        for micros in zip(*steps, strict=True):
            counts = [len(plan.keys) if plan.weight else 0 for plan in micros]
            assert [plan.of_ranks for plan in micros] == [counts] * ranks
        assert all(len(plan.keys) == 1 for plan in plans if not plan.weight)


class _Stream(IterableDataset[str]):
    @override
    def __iter__(self) -> Any:
        return iter(TEXTS)


def test_a_stream_has_no_lengths_before_it_is_read() -> None:
    """Batches of tokens need a map-style dataset."""
    with pytest.raises(ConfigError) as e:
        _source(_Stream(), _sizes())
    assert str(e.value) == (
        "batch.tokens: 20: data() returned a stream, and batches of tokens are planned by the length of every sample "
        "before the first step: return a map-style dataset, or give batch.total"
    )


def test_a_loaders_batch_size_would_have_no_effect() -> None:
    """The budget says how many samples are a batch."""
    config = Config.model_validate({"batch": {"tokens": 20}, "train": {"steps": 1}})
    with pytest.raises(TaskError) as e:
        data_source_of(DataLoader(_Growing(), batch_size=4), None, default_collate, config, _sizes())
    assert str(e.value) == (
        "the DataLoader's batch_size is 4, and batch.tokens (20) says how many samples are a batch: leave batch_size "
        "out"
    )
