"""Random numbers that follow from the config's seed and from what is done, not from who does it."""

from __future__ import annotations

import random

import numpy as np
import torch

_MASK = 2**64 - 1
MIX_START = 0x9E3779B97F4A7C15


def mix_seed(*numbers: int) -> int:
    """One 63-bit number from several; neighbours come out far apart."""
    return mix_into(MIX_START, *numbers) >> 1


def mix_into(state: int, *numbers: int) -> int:
    """`mix` on its way, from BEGUN on: what many mixes begin with is stirred in once."""
    for number in numbers:
        state = (state ^ number) * 0xBF58476D1CE4E5B9 & _MASK
        state ^= state >> 27
        state = state * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state


def seed_all(seed: int, *, cuda: bool = True) -> None:
    """Seed every generator that a user's code may draw from."""
    seed_torch(seed, cuda=cuda)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


def seed_torch(seed: int, *, cuda: bool = True) -> None:
    """PyTorch's alone: the others cost 15 us, which is too much for every microbatch."""
    torch.default_generator.manual_seed(seed)
    if cuda and torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)
