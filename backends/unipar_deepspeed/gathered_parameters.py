"""Parameters of ZeRO-3 gathered once, for forwards outside of DeepSpeed's engine."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import deepspeed
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import nn

_HOOKS = ("_forward_pre_hooks", "_forward_hooks")


def parameters_away(model: nn.Module) -> Sequence[Any]:
    """Return the parameters of which this rank has a part only."""
    parameters: list[Any] = list(model.parameters())
    return [p for p in parameters if getattr(p, "ds_status", None) == ZeroParamStatus.NOT_AVAILABLE]


@contextmanager
def all_parameters(model: nn.Module) -> Generator[None]:
    """Context manager: every rank has all parameters, and a forward does not release them."""
    away = parameters_away(model)
    with deepspeed.zero.GatheredParameters(away, enabled=bool(away)), _without_hooks(model):
        yield


@contextmanager
def _without_hooks(model: nn.Module) -> Generator[None]:
    """Context manager: DeepSpeed's hooks are off, which gather and release a module's parameters, with other ranks."""
    before = [(module, {name: vars(module)[name] for name in _HOOKS}) for module in model.modules()]
    for module, hooks in before:
        for name, registered_hooks in hooks.items():
            own = OrderedDict((key, hook) for key, hook in registered_hooks.items() if not _is_deepspeeds(hook))
            vars(module)[name] = own
    try:
        yield
    finally:
        for module, hooks in before:
            vars(module).update(hooks)


def _is_deepspeeds(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("deepspeed")
