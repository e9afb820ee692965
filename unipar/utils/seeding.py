"""Random seeds that follow from the config's seed and from step and sample numbers, not from the rank."""

from __future__ import annotations

import random
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

_MASK = 2**64 - 1
MIX_START = 0x9E3779B97F4A7C15


def mix_seed(*numbers: int) -> int:
    """Return one 63-bit seed from several numbers; neighbouring numbers give unrelated seeds."""
    return mix_into(MIX_START, *numbers) >> 1


def mix_into(state: int, *numbers: int) -> int:
    """Mix further numbers into a state and return the new one; the first state is MIX_START.

    Seeds that begin with the same numbers can share the state after those numbers.
    """
    for number in numbers:
        state = (state ^ number) * 0xBF58476D1CE4E5B9 & _MASK
        state ^= state >> 27
        state = state * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state


def seed_all(seed: int, *, device: bool = True) -> None:
    """Seed the random generators of PyTorch, Python and NumPy."""
    seed_torch(seed, device=device)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


@contextmanager
def kept_random_state() -> Generator[None]:
    """Context manager: afterwards PyTorch's generators are as before, on the CPU and on the device of this process.

    `fork_rng()` without devices would start each device of the machine, in every process.
    """
    kind = torch.accelerator.current_accelerator()
    module: Any = None if kind is None else torch.get_device_module(kind)
    devices: list[int] = []
    if module is not None and getattr(module, "is_initialized", lambda: False)():  # mps does not say
        devices.append(module.current_device())
    with torch.random.fork_rng(devices, device_type="cuda" if kind is None or not devices else kind.type):
        yield


def seed_torch(seed: int, *, device: bool = True) -> None:
    """Seed PyTorch's generators only: the other two take 15 us, which is too much for every microbatch.

    `device`: that of the accelerator too, if this process uses one.
    """
    torch.default_generator.manual_seed(seed)
    module: Any = torch.get_device_module() if device else torch.cpu
    if module is not torch.cpu and getattr(module, "is_initialized", lambda: True)():  # mps does not say
        module.manual_seed(seed)
