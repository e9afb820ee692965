"""Copies that oneDNN's convolutions make for themselves, beside what they are seen to allocate."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from unipar.planning.cpu_copies import copies_of_convolution

ATEN: Any = torch.ops.aten
Settings = tuple[tuple[int, ...], tuple[int, ...], int, int]
"""Shapes of input and weight, stride and padding."""

LARGE_WEIGHT: Settings = (2, 128, 3, 3), (128, 128, 3, 3), 1, 1
LARGE_INPUT: Settings = (4, 64, 14, 14), (64, 64, 3, 3), 1, 1
FIRST: Settings = (4, 3, 32, 32), (64, 3, 7, 7), 2, 3
ONE_SMALL: Settings = (1, 64, 4, 4), (64, 64, 3, 3), 1, 1


def call_of(settings: Settings, dtype: torch.dtype, *, backward: bool) -> tuple[Any, tuple[Any, ...]]:
    x_shape, weight_shape, stride, padding = settings
    x, weight = torch.zeros(x_shape, dtype=dtype), torch.zeros(weight_shape, dtype=dtype)
    how = [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], 1
    if not backward:
        return ATEN.convolution.default, (x, weight, None, *how)
    gradient = torch.zeros_like(ATEN.convolution(x, weight, None, *how))
    return ATEN.convolution_backward.default, (gradient, x, weight, None, *how, [True, True, False])


def allocated(func: Any, args: tuple[Any, ...]) -> tuple[Any, int]:
    """Return what an operation returns, and the most that it allocates beside that."""
    func(*args)  # its kernels are made ready
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        out = func(*args)
    results: Any = profiled.profiler
    changes = [event.nbytes() for event in results.kineto_results.events() if event.name() == "[memory]"]
    return out, max(accumulate(changes)) - sum(changes)


@pytest.mark.parametrize("settings", [LARGE_WEIGHT, LARGE_INPUT], ids=["large weight", "large input"])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_copies_are_those_that_are_measured(settings: Settings, backward: bool) -> None:
    """What torch allocates in such an operation is its result, and the larger of what is told."""
    func, args = call_of(settings, torch.float32, backward=backward)
    out, more = allocated(func, args)
    assert max(copies_of_convolution(func, args, out)) == more > 0


@pytest.mark.parametrize(
    ("settings", "dtype", "backward", "expected"),
    [
        (LARGE_WEIGHT, torch.float32, False, [4 * (2_304 + 147_456), 4 * 2_304]),
        (LARGE_WEIGHT, torch.float32, True, [4 * (2_304 + 2_304), 4 * 147_456]),
        (LARGE_WEIGHT, torch.bfloat16, True, [2 * (2_304 + 2_304) + 4 * 147_456, 2 * 147_456]),
        (LARGE_WEIGHT, torch.float64, True, []),
        (ONE_SMALL, torch.float32, False, []),
        (FIRST, torch.float32, False, [4 * (12_288 + 9_408), 4 * 65_536]),
    ],
)
def test_copies(settings: Settings, dtype: torch.dtype, backward: bool, expected: list[int]) -> None:
    """Input and weight, then the result; gradient and input, then the weight's gradient, which bf16 sums in fp32."""
    func, args = call_of(settings, dtype, backward=backward)
    assert list(copies_of_convolution(func, args, func(*args))) == expected


def test_channels_that_come_last_are_not_copied() -> None:
    """oneDNN takes them as they are, and copies the weight alone."""
    func, (x, weight, *rest) = call_of(LARGE_INPUT, torch.float32, backward=False)
    args = (x.to(memory_format=torch.channels_last), weight, *rest)
    out: Tensor = func(*args)
    assert list(copies_of_convolution(func, args, out)) == [weight.nbytes, 0]


def test_other_operations_have_none() -> None:
    """Only convolutions are known to copy."""
    assert list(copies_of_convolution(ATEN.mm.default, (torch.ones(2, 2),), torch.ones(2, 2))) == []
