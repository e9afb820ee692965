"""Axes of the mesh beside the data's: in the names of strategies, in the config, and in numbers of ranks."""

from __future__ import annotations

import pytest

from unipar.config import Config, Strategy
from unipar.config.sections.parallel import Parallel
from unipar.config.sections.strategy import Axes
from unipar.config.settled import SettledConfig
from unipar.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "name", "axes"),
    [
        ("native/parameters+tensor2", "native/parameters+tensor2", Axes(tensor=2)),
        ("native+pipeline4+gpipe", "native/nothing+pipeline4+gpipe", Axes(pipeline=4, schedule="gpipe")),
        (
            "native/nothing+sequence+context2+zerobubble+pipeline2+tensor4",
            "native/nothing+tensor4+pipeline2+context2+sequence+zerobubble",
            Axes(tensor=4, pipeline=2, context=2, sequence=True, schedule="zerobubble"),
        ),
        ("native/nothing+tensor1", "native/nothing", Axes()),
        ("native/parameters+expert4", "native/parameters+expert4", Axes(expert=4)),
        ("native/nothing+expert2+tensor2", "native/nothing+tensor2+expert2", Axes(tensor=2, expert=2)),
    ],
)
def test_a_strategy_with_axes(text: str, name: str, axes: Axes) -> None:
    """Words may come in any order and are written in one; a size of 1 is none."""
    strategy = Strategy.parse(text)
    assert strategy.axes == axes
    assert str(strategy) == name
    assert Strategy.parse(name) == strategy
    assert strategy.without_axes == Strategy("native", strategy.shard)


def test_a_variant_beside_axes() -> None:
    """The variant comes first."""
    strategy = Strategy.parse("deepspeed/gradients+tensor2+library")
    assert strategy == Strategy("deepspeed", "gradients", "library", Axes(tensor=2))
    assert str(strategy) == "deepspeed/gradients+library+tensor2"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("native/nothing+tensor0", "a size is at least 1"),
        ("native/nothing+expert0", "a size is at least 1"),
        ("native/nothing+tensor2+tensor3", "it says tensor twice; say it once"),
        ("native/nothing+pipeline2+gpipe+interleaved", "it says schedule twice; say it once"),
        (
            "native/nothing+sequence",
            "sequence splits activations over the ranks of tensor, and tensor is 1: give tensor, or leave it out",
        ),
        (
            "native/nothing+zerobubble",
            "zerobubble is a schedule of pipelines, and pipeline is 1: give pipeline, or leave it out",
        ),
    ],
)
def test_words_that_make_no_strategy(text: str, why: str) -> None:
    """Words without effect, and contradictions, are refused."""
    with pytest.raises(ConfigError) as e:
        Strategy.parse(text)
    assert str(e.value) == f"{text!r} is not a strategy: {why}"


def test_ranks_in_all() -> None:
    """Parts of the data times the sizes of the axes."""
    assert Parallel(data=2, tensor=2, pipeline=3).ranks == 12
    assert Parallel(tensor=2).ranks == "auto"


@pytest.mark.parametrize(
    ("ranks", "why"),
    [
        (
            6,
            "6 ranks cannot be divided into tensor 2 x pipeline 2 (4 ranks each): start a multiple of 4 ranks, or "
            "change the sizes",
        ),
        (
            12,
            "parallel.shard_over (2) does not divide the number of ranks (3): give a divisor of it, or leave "
            "shard_over out, so that all ranks split one copy",
        ),
    ],
)
def test_sizes_that_do_not_fit(ranks: int, why: str) -> None:
    """The product of the axes divides the ranks, and copies divide what is left for the data."""
    with pytest.raises(ConfigError) as e:
        Parallel(shard="parameters", shard_over=2, tensor=2, pipeline=2).settle(ranks)
    assert str(e.value) == why


def test_ranks_of_experts_are_those_of_the_data() -> None:
    """They make no more ranks, and are named in the words for a mesh."""
    parallel = Parallel(data=4, tensor=2, expert=2)
    assert (parallel.ranks, parallel.axes.ranks, parallel.axes.fewest_ranks) == (8, 2, 4)
    assert parallel.axes.with_data(4) == "data 4 (expert 2) x tensor 2"
    parallel.settle(8)


@pytest.mark.parametrize(
    ("parallel", "ranks", "why"),
    [
        (
            Parallel(expert=4),
            2,
            "parallel.expert (4) does not divide the number of data ranks (2), each 4 of which hold all experts: give "
            "a divisor of it, or start a multiple of 4 ranks",
        ),
        (
            Parallel(tensor=2, expert=2),
            6,
            "parallel.expert (2) does not divide the number of data ranks (3), each 2 of which hold all experts: give "
            "a divisor of it, or start a multiple of 4 ranks",
        ),
        (
            Parallel(tensor=2, expert=2),
            3,
            "3 ranks cannot be divided into tensor 2 x expert 2 (4 ranks each): start a multiple of 4 ranks, or change "
            "the sizes",
        ),
    ],
)
def test_experts_that_do_not_divide_the_data(parallel: Parallel, ranks: int, why: str) -> None:
    """The data's axis is a multiple of the experts' one."""
    with pytest.raises(ConfigError) as e:
        parallel.settle(ranks)
    assert str(e.value) == why


def test_a_batch_is_divided_among_the_data_alone() -> None:
    """Four ranks of which two see the same samples: a batch of 24 in microbatches of 3 takes four from each."""
    config = Config.model_validate(
        {"batch": {"total": 24, "micro": 3}, "parallel": {"tensor": 2}, "train": {"steps": 1}}
    )
    settled = SettledConfig.of(config, Strategy("native", axes=config.parallel.axes), 4, "cpu")
    assert settled.config.parallel.data == 2
    assert (settled.sizes.ranks, settled.sizes.accumulate, settled.ranks) == (2, 4, 4)
