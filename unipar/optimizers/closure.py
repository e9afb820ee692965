"""Closure of an optimizer's step, as every optimizer of PyTorch takes one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def loss_of_closure(closure: Callable[[], Any] | None) -> Any:
    """Return the loss that the closure computes, with gradients; None without a closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
