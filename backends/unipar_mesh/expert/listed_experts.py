"""Experts that are a list of equal modules: two passes of the module that calls them, and the experts between."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, final

import torch
from torch import Tensor, nn
from typing_extensions import override

from unipar.errors import TaskError
from unipar.utils.seeding import kept_random_state

RunExperts = Callable[[Mapping[int, Tensor]], Mapping[int, Tensor]]
"""What returns the experts' outputs for the rows of each."""


@final
class ExpertCalls:
    """Rows that each expert of a list is given in a first pass, and what it returns in a second."""

    def __init__(self, experts: nn.ModuleList) -> None:
        self.rows: dict[int, Tensor] = {}
        self.outputs: Mapping[int, Tensor] | None = None
        self.stubs = nn.ModuleList(_Stub(self, number) for number in range(len(experts)))


@final
class _Stub(nn.Module):
    """Module that stands for an expert in the loop of the module that calls it."""

    def __init__(self, calls: ExpertCalls, number: int) -> None:
        super().__init__()
        self._of, self._number = [calls], number

    @override
    def forward(self, rows: Tensor) -> Tensor:
        (calls,) = self._of
        if calls.outputs is None:
            if self._number in calls.rows:
                raise TaskError(
                    f"expert {self._number} is called twice, and parallel.expert sends rows once: leave it out"
                )
            if rows.ndim != 2:
                raise TaskError(
                    f"expert {self._number} is given {tuple(rows.shape)}, and parallel.expert sends rows: leave it out"
                )
            calls.rows[self._number] = rows
            return torch.zeros_like(rows)
        before = calls.rows.get(self._number)
        if before is None or before.shape != rows.shape:
            raise TaskError(
                f"expert {self._number} is given other rows once others have returned theirs: parallel.expert runs all "
                "of them at the same time; leave it out"
            )
        return calls.outputs[self._number]


@final
class ListedExperts:
    """Forward of a module that calls a list of experts."""

    def __init__(self, module: nn.Module, inner: str, calls: ExpertCalls) -> None:
        self._module, self._inner, self._calls, self._forward = module, inner, calls, module.forward

    def run(self, run_experts: RunExperts, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return what the module returns, with the experts' outputs from `run_experts`."""
        calls, experts = self._calls, getattr(self._module, self._inner)
        calls.rows.clear()
        calls.outputs = None
        setattr(self._module, self._inner, calls.stubs)
        try:
            with kept_random_state():
                self._forward(*args, **kwargs)
            setattr(self._module, self._inner, experts)
            calls.outputs = run_experts(calls.rows)
            setattr(self._module, self._inner, calls.stubs)
            return self._forward(*args, **kwargs)
        finally:
            setattr(self._module, self._inner, experts)
            calls.rows, calls.outputs = {}, None
