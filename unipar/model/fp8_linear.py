"""`Fp8Linear`: torchao's linear layer in fp8, under autocast of any device; and one that notes what multiplies.

Imported when a config asks for it: torchao takes seconds to import.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, cast, final

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,  # pyright: ignore[reportPrivateUsage] - no public way
    is_traceable_wrapper_subclass_type,
)
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear
from typing_extensions import override

from unipar.backend.precision import FP8_MULTIPLE
from unipar.errors import ConfigError

_PRODUCTS: Final = {"mm", "addmm", "bmm", "baddbmm", "linear"}


class Fp8Linear(Float8Linear):
    """torchao's linear layer, which leaves fp8 where autocast is off, as in a proof in full precision.

    torchao casts to bf16 under CUDA's autocast alone, and refuses inputs without rows; kernels refuse numbers of rows
    that are not divisible by 16.
    """

    @override
    def forward(self, input: Tensor) -> Tensor:
        device = input.device.type
        if not _autocast_is_on(device):
            return functional.linear(input, self.weight, self.bias)
        dtype = torch.get_autocast_dtype(device)
        if not input.numel():
            return functional.linear(input.to(dtype), self.weight.to(dtype))
        rows = input.shape[:-1].numel()
        x = input.to(dtype)
        if rows % FP8_MULTIPLE == 0:
            return super().forward(x)
        padded = functional.pad(x.reshape(rows, input.shape[-1]), (0, 0, 0, -rows % FP8_MULTIPLE))
        return super().forward(padded)[:rows].reshape(*input.shape[:-1], -1)


@final
class ObservedFp8Linear(Fp8Linear):
    """Linear layer in fp8 that notes, once, what multiplies: beside its first forward, which stays as it is."""

    kernel: str | None = None
    """Product that multiplied; None: nothing did in fp8."""

    left_by: str = ""
    """How the layer's weight was used without a product in fp8; judged only if there was none with one."""

    @override
    def forward(self, input: Tensor) -> Tensor:
        if self.kernel is None and input.numel():
            if _autocast_is_on(input.device.type):
                self._observe(input)
            else:
                self.left_by = "was called where autocast is off"
        return super().forward(input)

    @override
    def __getattr__(self, name: str) -> Any:
        value: Any = super().__getattr__(name)
        if name == "weight" and self.kernel is None and _autocast_is_on(value.device.type):
            self.__dict__.setdefault("left_by", "was not called, and its weight was used")
        return value

    def _observe(self, x: Tensor) -> None:
        """Note what multiplies some rows of the input, in no one's sight: selective recomputing counts operations."""
        self._check_sizes()
        rows = x.detach().reshape(-1, x.shape[-1])[:FP8_MULTIPLE]
        with torch.no_grad(), _disable_current_modes(), _Products() as products:
            super().forward(rows)
        self.kernel = products.kernel
        if self.kernel is None:
            self.left_by = f"multiplied in {' and '.join(sorted(products.dtypes)) or 'no product'}"

    def _check_sizes(self) -> None:
        """Raise ConfigError if a rank's part of the weight has sizes that an fp8 product refuses."""
        sizes = tuple(self.weight.shape)
        if any(size % FP8_MULTIPLE for size in sizes):
            raise ConfigError(
                f"train.precision: fp8 multiplies matrices whose sizes are divisible by {FP8_MULTIPLE}, and a rank's "
                f"part of one of {self.out_features} x {self.in_features} is {sizes[0]} x {sizes[1]}: lower "
                "parallel.tensor, or take bf16-mixed"
            )


def _autocast_is_on(device: str) -> bool:
    return device != "meta" and torch.is_autocast_enabled(device)


def kernel_on(device: torch.device, recipe: str, *, emulate: bool) -> str | None:
    """Return what multiplies in a layer of its own on a device; None: nothing does in fp8."""
    layer = nn.Linear(FP8_MULTIPLE, FP8_MULTIPLE, device=device)
    make_fp8([layer], recipe, emulate=emulate, observed=True)
    with torch.autocast(device.type, torch.bfloat16):
        layer(torch.ones(FP8_MULTIPLE, FP8_MULTIPLE, device=device))
    return cast(ObservedFp8Linear, layer).kernel


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


def make_fp8(linears: Sequence[nn.Linear], recipe: str, *, emulate: bool, observed: bool) -> None:
    """Make linear layers multiply in fp8, in place, so that names, hooks and what refers to them stay.

    `observed`: each notes what multiplies. A model that is compiled, or planned, cannot.
    """
    settings = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
    converted: Any = convert_to_float8_training(nn.ModuleList(linears), config=settings)
    for linear, made in zip(linears, converted, strict=True):
        linear.__dict__.update({key: value for key, value in vars(made).items() if key not in vars(linear)})
        linear.__class__ = ObservedFp8Linear if observed else Fp8Linear
