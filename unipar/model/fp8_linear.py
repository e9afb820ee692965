"""`Fp8Linear`: torchao's linear layer in fp8 under autocast of any device; it notes what multiplied.

Imported when a config asks for it: torchao takes seconds to import.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear
from typing_extensions import override

_ROWS: Final = 16
"""Number by which the rows of an input must be divisible: the weight's gradient is a product along them."""

_PRODUCTS: Final = {"mm", "addmm", "bmm", "baddbmm", "linear"}


@final
class Fp8Linear(Float8Linear):
    """torchao's linear layer, which it leaves fp8 where autocast is off.

    torchao casts to bf16 under CUDA's autocast alone, and refuses inputs without rows; kernels refuse numbers of rows
    that are not divisible by 16.
    """

    kernel: str | None = None
    """What multiplied in the first forward; None: there was none."""

    left_by: str = ""
    """How the layer's weight was used without a product in fp8; judged only if there was none with one."""

    @override
    def forward(self, input: Tensor) -> Tensor:
        device = input.device.type
        if not _autocast_is_on(device):
            self.left_by = "was called where autocast is off"
            return functional.linear(input, self.weight, self.bias)
        dtype = torch.get_autocast_dtype(device)
        rows = input.numel() // self.in_features
        if not rows:
            return input.new_empty((*input.shape[:-1], self.out_features), dtype=dtype)
        x = input.to(dtype)
        if rows % _ROWS:
            x = functional.pad(x.reshape(rows, self.in_features), (0, 0, 0, -rows % _ROWS))
        if self.kernel is None and not torch.compiler.is_compiling():
            with _Products() as products:
                out = super().forward(x)
            self.kernel = products.kernel
            if self.kernel is None:
                self.left_by = f"multiplied in {' and '.join(sorted(products.dtypes)) or 'no product'}"
        else:
            out = super().forward(x)
        return out[:rows].reshape(*input.shape[:-1], self.out_features) if rows % _ROWS else out

    @override
    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        if name == "weight" and self.kernel is None and _autocast_is_on(value.device.type):
            self.__dict__.setdefault("left_by", "was not called, and its weight was used")
        return value


def _autocast_is_on(device: str) -> bool:
    return device != "meta" and torch.is_autocast_enabled(device)


class _Products(TorchDispatchMode):
    """Dispatch mode that records what multiplies matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel: str | None = None
        self.dtypes: set[str] = set()
        self._in_fp8 = False

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if any(map(is_traceable_wrapper_subclass_type, types)):
            self._in_fp8 |= name in _PRODUCTS
            return NotImplemented  # what the subclass of tensors does with those inside is seen instead
        if name == "_scaled_mm":
            self.kernel = "torch._scaled_mm"
        elif name in _PRODUCTS:
            dtypes = {str(t.dtype).removeprefix("torch.") for t in args if isinstance(t, Tensor)}
            if self._in_fp8 and dtypes == {"float32"}:
                self.kernel = "emulated in fp32"
            else:
                self.dtypes |= dtypes
        return func(*args, **(kwargs or {}))


def make_fp8(linears: Sequence[nn.Linear], recipe: str, *, emulate: bool) -> None:
    """Make linear layers multiply in fp8, in place, so that names, hooks and what refers to them stay."""
    settings = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
    for linear, made in zip(linears, convert_to_float8_training(nn.ModuleList(linears), config=settings), strict=True):
        new = {key: value for key, value in vars(made).items() if key not in vars(linear)}
        linear.__dict__.update(new)
        linear.__class__ = Fp8Linear
