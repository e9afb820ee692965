"""Dtypes of each precision, as words and as torch dtypes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from unipar.config import Precision

if TYPE_CHECKING:
    import torch

FP8_RECIPES: Final[Mapping[Precision, str]] = {"fp8": "tensorwise", "fp8-rowwise": "rowwise"}
"""torchao's recipe of each precision in which linear layers multiply in fp8."""

FP8_MULTIPLE: Final = 16
"""Number by which sizes of a product in fp8 must be divisible."""


@dataclass(frozen=True)
class Dtypes:
    """Dtypes in which parameters, gradients and so on are kept and computed, in words; `explain` prints them."""

    parameter: str
    master: str
    gradient: str
    reduction: str
    compute: str


def default_dtypes(precision: Precision, *, reduction: str | None = None) -> Dtypes:
    """Return the dtypes of a library that leaves precision to PyTorch; other backends change some of them."""
    if precision == "fp64":
        return Dtypes("fp64", "-", "fp64", reduction or "fp64", "fp64")
    if precision == "bf16-mixed":
        return Dtypes("fp32", "-", "fp32", reduction or "fp32", "bf16 under autocast")
    if precision in FP8_RECIPES:
        return Dtypes("fp32", "-", "fp32", reduction or "fp32", f"fp8 ({FP8_RECIPES[precision]}) in linears, else bf16")
    if precision == "fp16":
        return Dtypes("fp32", "-", "fp32, of a scaled loss", reduction or "fp32", "fp16 under autocast")
    if precision == "bf16-master":
        return Dtypes("fp32, gathered as bf16", "the fp32 shards", "bf16, summed in fp32", reduction or "fp32", "bf16")
    return Dtypes("fp32", "-", "fp32", reduction or "fp32", "fp32")


def parameter_dtype(precision: Precision) -> torch.dtype:
    """Return the dtype of parameters before a library takes them."""
    import torch

    return torch.float64 if precision == "fp64" else torch.float32


def batch_dtype(precision: Precision) -> torch.dtype | None:
    """Return the dtype to which floating-point tensors of a batch are cast; None if they are not."""
    import torch

    return {"fp64": torch.float64, "bf16-master": torch.bfloat16}.get(precision)


def autocast_dtype(precision: Precision) -> torch.dtype | None:
    """Return the dtype in which autocast computes; None if autocast is not used."""
    import torch

    if precision in FP8_RECIPES:
        return torch.bfloat16
    return {"bf16-mixed": torch.bfloat16, "fp16": torch.float16}.get(precision)
