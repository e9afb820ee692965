"""Whether memory tells strategies apart at a model's size, and from which size on it would."""

from __future__ import annotations

import pytest

from unipar.backend import Category
from unipar.planning.memory_margin import StrategyPeak, describe_no_difference, format_count, measure_margin

MIB = 2**20


def peak(name: str, kept: float, more: float, fixed: float, noise: float = 0.0) -> StrategyPeak:
    """Return a peak in MiB: of parameters and optimizer states, of activations, of libraries."""
    held: dict[Category, float]
    held = {"parameters": kept / 4, "optimizer": kept * 3 / 4, "activations": more, "library": fixed}
    return StrategyPeak(name, {category: round(size * MIB) for category, size in held.items()}, round(noise * MIB))


# a GPT-2 of 72,000 parameters on two ranks, as `unipar compare` measured it
DDP = peak("native/nothing", 0.8, 1.2, 5.0, 0.05)
FSDP2 = peak("native/parameters", 0.4, 1.2, 5.25, 0.05)
ZERO = peak("deepspeed/optimizer", 0.6, 1.5, 17.0, 0.05)


def test_a_saving_below_what_runtime_and_libraries_weigh_does_not_count() -> None:
    """Sharding saves 0.4 MiB and the rest weighs 5.05: 12.6 times the model, 910,000 parameters, would count."""
    found = measure_margin([DDP, FSDP2, ZERO])
    assert found.alike == ("native/parameters", "native/nothing", "deepspeed/optimizer")
    assert found.margin == round(5.05 * MIB)
    assert found.factor == pytest.approx(12.625, rel=1e-4)
    assert describe_no_difference(found, "these strategies", 72_000) == (
        "memory does not tell these strategies apart at this size: their trainings differ by 512 KiB at most, and "
        "runtime and libraries take 5.0 MiB to 17 MiB; it would with about 910,000 parameters or more"
    )


def test_a_larger_model_is_told_apart() -> None:
    """The same model, 12.6 and 12.7 times as large: below and above the size that the sentence names."""
    for factor, alike in ((12.6, 2), (12.7, 1)):
        large = [peak("a", 0.8 * factor, 1.2, 5.0, 0.05), peak("b", 0.4 * factor, 1.2, 5.25, 0.05)]
        assert len(measure_margin(large).alike) == alike


def test_noise_of_the_recorded_steps_counts() -> None:
    """Peaks of one strategy that differ by more than the saving tell nothing, even where nothing else weighs."""
    quiet, loud = ([peak("a", 8.0, 2.0, 0.0, noise), peak("b", 4.0, 2.0, 0.0)] for noise in (3.9, 4.1))
    assert measure_margin(quiet).alike == ("b",)
    found = measure_margin(loud)
    assert found.alike == ("b", "a")
    assert describe_no_difference(found, "these strategies", 10**9) == (
        "memory does not tell these strategies apart at this size: their trainings differ by 4.0 MiB at most, and "
        "runtime and libraries take 0 B, and peaks of one strategy differ by 4.1 MiB; it would with about 1.1 billion "
        "parameters or more"
    )


def test_strategies_that_are_larger_are_left_out() -> None:
    """Two are alike, and the third holds buffers of its own."""
    found = measure_margin([DDP, peak("deepspeed/gradients+library", 0.6, 1900.0, 17.0), FSDP2])
    assert found.alike == ("native/parameters", "native/nothing")
    assert found.saved == round(0.4 * MIB)


@pytest.mark.parametrize(
    ("strategies", "parameters", "said"),
    [
        ([DDP, peak("b", 0.8, 1.0, 5.0)], 72_000, "nor would it at another size: they hold the same parameters and "),
        ([DDP, FSDP2], 0, "it would if the model were 13 times as large"),
        ([peak("a", 20.0, 1.0, 5.0), peak("b", 10.0, 10.0, 5.0)], 72_000, "other buffers take again what sharding"),
    ],
    ids=["not sharded", "size unknown", "taken again"],
)
def test_other_ends_of_the_sentence(strategies: list[StrategyPeak], parameters: int, said: str) -> None:
    """Strategies that shard nothing, a model of unknown size, and a saving that other buffers use up."""
    text = describe_no_difference(measure_margin(strategies), "these strategies", parameters)
    assert text.partition("; ")[2].startswith(said)


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (872_345, "880,000"),
        (1_000_000, "1 million"),
        (1_210_000, "1.3 million"),
        (12_100_000, "13 million"),
        (999_000_001, "1 billion"),
        (123_000_000_000, "130 billion"),
        (7, "7"),
    ],
)
def test_large_numbers(number: float, said: str) -> None:
    """Rounded up to two digits."""
    assert format_count(number) == said
