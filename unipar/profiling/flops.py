"""`FlopCounter`: counts the operations of a step's forward and backward, without those that are computed again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, final

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_flop_count
from typing_extensions import override

from unipar.backend import LossFn

_ATEN: Final[Any] = torch.ops.aten
_NAMESPACES_OF_TORCH: Final = frozenset(
    {"aten", "prim", "prims", "c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "fsdp"}
    | {"profiler", "inductor", "higher_order", "symm_mem", "_dtensor", "torch_attn", "debugprims", "rngprims"}
)
_UNCOUNTED: Final = frozenset(
    {"_cudnn_rnn", "miopen_rnn", "mkldnn_rnn_layer", "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell"}
    | {"_scaled_grouped_mm"}
)
"""Operations of torch with many multiplications, for which its counter has no formula."""


def _attention_forward(query: Any, key: Any, value: Any, *rest: Any, **more: Any) -> int:
    return sdpa_flop_count(query.shape, key.shape, value.shape)


def _attention_backward(gradient: Any, query: Any, key: Any, value: Any, *rest: Any, **more: Any) -> int:
    return 2 * sdpa_flop_count(query.shape, key.shape, value.shape)


def _grouped_product(one: Any, other: Any, *rest: Any, **more: Any) -> int:
    """Return the operations of a product in groups, as mixtures of experts have it."""
    groups = one.shape[0] if one.ndim == other.ndim == 3 else 1
    return int(2 * groups * one.shape[-2] * one.shape[-1] * other.shape[-1])


def _without_scores(formula: Callable[..., int]) -> Callable[..., int]:
    """Return a formula for an attention's backward without the scores, which are one of its five products."""

    def shorter(*args: Any, **kwargs: Any) -> int:
        return formula(*args, **kwargs) * 4 // 5

    return shorter


def _formulas() -> dict[Any, Callable[..., int]]:
    """Return the formula of each operation that counts.

    They are those of torch's counter, with three differences. Attention on the CPU counts as it does on a GPU, and
    products in groups count. The
    backward of fused attention counts its four products, without the scores, which the kernel computes again.
    """
    formulas: dict[Any, Callable[..., int]] = dict(flop_registry)
    for operation, formula in flop_registry.items():
        if "attention" in str(operation) and "backward" in str(operation):
            formulas[operation] = _without_scores(formula)
    for name in ("flash", "efficient", "cudnn"):
        formulas[getattr(_ATEN, f"_scaled_dot_product_{name}_attention_backward")] = _attention_backward
    formulas[_ATEN._scaled_dot_product_flash_attention_for_cpu] = _attention_forward
    formulas[_ATEN._scaled_dot_product_flash_attention_for_cpu_backward] = _attention_backward
    formulas[_ATEN._grouped_mm] = _grouped_product
    return formulas


_FORMULAS: Final = _formulas()
_RAW: Final = frozenset({_attention_forward, _attention_backward, _grouped_product})


def count_operations(func: Any, args: Any, kwargs: Any, out: Any) -> int | None:
    """Return the number of arithmetic operations of a call of torch, or None if there is no formula for it."""
    formula = _FORMULAS.get(getattr(func, "overloadpacket", func))
    if formula is None:
        return None
    return formula(*args, **kwargs) if formula in _RAW else formula(*args, **kwargs, out_val=out)


class CollectiveCalled(Exception):
    """A collective was called where one rank computes alone."""


@final
class FlopCounter(TorchDispatchMode):
    """Dispatch mode that counts operations in the loss, and in backward; it changes nothing, and raises nothing.

    What runs outside of both (clipping, the optimizer) does not count. In backward, gradients are computed without
    recording; what is recorded there is a forward that is computed again, and counts as `recomputed`. Autograd's
    threads inherit the mode. Graphs that torch compiles run as they are, unseen.
    """

    supports_higher_order_operators = True

    def __init__(self, *, alone: bool = False, in_loss: Callable[[], bool] = lambda: False) -> None:
        """`alone`: no other rank computes with this one, and a collective raises CollectiveCalled.

        `in_loss`: whether what runs now is part of a loss that is not `watched`.
        """
        super().__init__()
        self._in_other_loss = in_loss
        self.flops = self.recomputed = 0
        self.unknown: dict[str, None] = {}
        """Operations that are not torch's own, in the order in which they were met."""

        self.uncounted: dict[str, None] = {}
        """Operations of torch for which there is no formula, or whose formula failed."""

        self._alone, self._in_loss = alone, False
        self.in_forward = False
        """Whether an operation was counted in the loss."""

    @classmethod
    @override
    def ignore_compile_internals(cls) -> bool:
        return True  # else torch would not compile what runs under the mode, and never try again

    def watched(self, loss: LossFn) -> LossFn:
        """Return the loss with a note that what runs is part of it."""

        def inner(model: Any, batch: Any, number: int) -> Any:
            self._in_loss = True
            try:
                return loss(model, batch, number)
            finally:
                self._in_loss = False

        return inner

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # DTensor calls the same operations on plain tensors, which count then
        if self._alone and func.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
            raise CollectiveCalled(func.__name__)
        out = func(*args, **(kwargs or {}))
        in_backward = torch._C._current_graph_task_id() != -1  # pyright: ignore[reportPrivateUsage] - no public way
        in_loss = self._in_loss or (not in_backward and self._in_other_loss())
        if in_loss or in_backward:
            self._count(func, args, kwargs or {}, out, in_loss=in_loss)
        return out

    def why_not_complete(self) -> str:
        """Return why the count is not that of a whole step, or ""."""
        if self.uncounted:
            return f"PyTorch's counter has no formula for {', '.join(self.uncounted)}"
        return "" if self.in_forward else "the forward has no operation that PyTorch's counter knows"

    def describe_unknown(self) -> str:
        """Return a sentence on the operations that are not torch's own."""
        return f"without the operations of {', '.join(self.unknown)}, for which PyTorch's counter has no formula"

    def _count(self, func: Any, args: Any, kwargs: Any, out: Any, *, in_loss: bool) -> None:
        packet = getattr(func, "overloadpacket", func)
        try:
            flops = count_operations(func, args, kwargs, out)
        except Exception:  # the training must not end because a formula does not fit
            self.uncounted[packet.__name__] = None
            return
        if flops is None:
            if func.namespace not in _NAMESPACES_OF_TORCH:
                self.unknown[str(packet).replace(".", "::")] = None
            elif packet.__name__ in _UNCOUNTED:
                self.uncounted[packet.__name__] = None
            return
        if in_loss or not torch.is_grad_enabled():
            self.flops += flops
            self.in_forward |= in_loss
        else:
            self.recomputed += flops
