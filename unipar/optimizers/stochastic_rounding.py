"""Rounding to bf16 up or down by chance: an element's chance is the same on whichever rank it is, in every world."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from hashlib import blake2b
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

# as int32, of which products and sums are taken modulo 2 ** 32
_PLACE: Final = 0x9E3779B1 - 2**32
_STEP: Final = 0x85EBCA6B - 2**32, 0x27D4EB2F
_MIX: Final = 0x7FEB352D, 0x846CA68B - 2**32


class ElementRuns(NamedTuple):
    """Elements of a whole tensor in row-major order: `runs` runs of `length`, `stride` from one run to the next."""

    start: int
    length: int
    stride: int = 0
    runs: int = 1

    def numbers(self, first: int, end: int, device: torch.device) -> Tensor:
        """Return the places, modulo 2 ** 32, of those elements from `first` to before `end` of all the runs'."""
        if self.runs == 1:
            return torch.arange(end - first, dtype=torch.int32, device=device).add_(_as_int32(self.start + first))
        numbers = torch.arange(first, end, device=device)
        numbers += numbers.div(self.length, rounding_mode="floor") * (self.stride - self.length)
        return numbers.add_(self.start).to(torch.int32)


MOMENTS: Final = ("exp_avg", "exp_avg_sq")
"""Keys of the states that are in bf16."""

NamedViews = Callable[[Tensor, Tensor], Iterable[tuple[str, ElementRuns, Tensor]]]
"""Function of a tensor of the groups and one that is laid out like it: the second's parts that lie in each parameter.

Each with the parameter's name and the elements that it holds of it.
"""


class RoundedMoments(Optimizer, ABC):
    """Base of optimizers that keep moments in bf16, rounded by chance."""

    views: NamedViews | None = None
    """Function by which an engine says which elements this rank has; None: each tensor is a whole parameter."""

    @abstractmethod
    def new_moment(self, p: Tensor) -> Tensor:
        """Return a parameter's moment of zeros, laid out like it: a DTensor if it is one."""


def _as_int32(number: int) -> int:
    return (number + 2**31) % 2**32 - 2**31


def draw_bits(numbers: Tensor, step: Tensor, about: str) -> Tensor:
    """Return 32 bits for each number, all int32: they depend on the number, the step and a text alone."""
    digest = blake2b(about.encode(), digest_size=8).digest()
    one, other = (int.from_bytes(digest[i : i + 4], "little", signed=True) for i in (0, 4))
    now = step.to(torch.int32)
    x = (numbers * _PLACE).add_(now * _STEP[0] + one)
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(_MIX[0])
    x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).add_(now * _STEP[1] + other).mul_(_MIX[1])
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))


def round_by_chance(t: Tensor, bits: Tensor) -> Tensor:
    """Round contiguous fp32 numbers in place to such as bf16 has, and return them.

    Each becomes one of its two neighbours: the nearer that is, the more often it is taken. `bits` is from 0 to 65,535
    for each number, all equally often. What is not finite becomes NaN.
    """
    nothing = t - t  # NaN where it is not finite: its bits may all be ones, and adding to them would make a zero
    t.view(torch.int32).add_(bits.view(t.shape)).bitwise_and_(-0x10000)
    return t.add_(nothing)
