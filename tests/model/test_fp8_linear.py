"""Numbers of a linear layer in fp8: those of torchao's formula on every device, for any number of rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from typing_extensions import override

from unipar.errors import ConfigError
from unipar.model.fp8_linear import kernel_on, make_fp8

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def layer(recipe: str = "tensorwise", *, observed: bool = True, emulate: bool = True) -> nn.Linear:
    """A layer of 32 to 48, always the same."""
    torch.manual_seed(0)
    made = nn.Linear(32, 48)
    make_fp8([made], recipe, emulate=emulate, observed=observed)
    return made


def rows(count: int) -> Tensor:
    """Inputs, always the same."""
    return torch.randn(count, 32, generator=torch.Generator().manual_seed(1))


def call(made: nn.Module, x: Tensor) -> Tensor:
    """A call under the run's autocast."""
    with torch.autocast("cpu", torch.bfloat16):
        return made(x)


def rounded(x: Tensor, dtype: torch.dtype = E4M3, dim: int | None = None) -> Tensor:
    """A tensor of numbers that fp8 has: scaled so that the largest, of all or along `dim`, is fp8's largest."""
    largest = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)
    scale = (torch.finfo(dtype).max / largest.double()).float()
    if dim is not None:
        scale = torch.exp2(torch.floor(torch.log2(scale)))
    return (x.float() * scale).to(dtype).float() / scale


class Factors(TorchDispatchMode):
    """Sizes of the factors that the device's product in fp8 gets."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[tuple[int, ...]] = []

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented
        if func.overloadpacket.__name__ == "_scaled_mm":
            self.sizes.append((*args[0].shape, *args[1].shape))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("observed", [True, False])
def test_a_product_of_tensors_with_one_scale(observed: bool) -> None:
    """Forward in e4m3, gradients in e5m2; the weight is rounded from fp32, the input from bf16."""
    made, x = layer(observed=observed), rows(16).requires_grad_()
    out = call(made, x)
    assert out.dtype == torch.bfloat16
    low = x.detach().bfloat16()
    weight, bias = made.weight.detach(), made.bias.detach().bfloat16()
    assert torch.equal(out, (rounded(low) @ rounded(weight).t()).bfloat16() + bias)
    gradient = torch.randn(16, 48, generator=torch.Generator().manual_seed(2)).bfloat16()
    out.backward(gradient)
    assert x.grad is not None
    assert made.weight.grad is not None
    assert torch.equal(x.grad, (rounded(gradient, E5M2) @ rounded(weight)).bfloat16().float())
    assert torch.equal(made.weight.grad, (rounded(gradient, E5M2).t() @ rounded(low)).bfloat16().float())


def test_a_product_of_rows_with_a_scale_each() -> None:
    """All in e4m3; scales are powers of two, along what a product adds up."""
    made, x = layer("rowwise"), rows(16)
    out = call(made, x)
    low, weight = x.bfloat16(), made.weight.detach()
    expected = rounded(low, dim=1) @ rounded(weight, dim=1).t()
    assert torch.equal(out, expected.bfloat16() + made.bias.detach().bfloat16())


@pytest.mark.parametrize("count", [1, 7, 16, 19])
def test_any_number_of_rows(count: int) -> None:
    """A weight's gradient is a product along rows, of which kernels want multiples of 16: zeros are added."""
    made, padded = layer(emulate=False), layer(emulate=False)
    more = torch.cat([rows(count), torch.zeros(-count % 16, 32)])
    whole = call(padded, more)
    with Factors() as factors:
        out = call(made, rows(count).view(1, count, 32))
        out.sum().backward()
    assert len(factors.sizes) == 3  # what was observed beside the first forward is not among them
    assert all(size % 16 == 0 for sizes in factors.sizes for size in sizes)
    assert torch.equal(out, whole[:count].view(1, count, 48))
    whole[:count].sum().backward()
    assert made.weight.grad is not None
    assert padded.weight.grad is not None
    assert torch.equal(made.weight.grad, padded.weight.grad)


def test_no_rows() -> None:
    """As an expert without tokens has: torchao would look for the largest of no numbers."""
    made = layer()
    out = call(made, rows(16)[:0])
    assert (out.shape, out.dtype) == ((0, 48), torch.bfloat16)
    out.sum().backward()
    assert made.weight.grad is not None
    assert not made.weight.grad.any()
    assert vars(made).get("kernel") is None


def test_full_precision_without_autocast() -> None:
    """In which a mesh proves that its parts are the whole model."""
    made, x = layer(), rows(16)
    assert torch.equal(made(x), functional.linear(x, made.weight, made.bias))


def test_part_of_a_weight_whose_size_no_kernel_takes() -> None:
    """A rank's part has other sizes than the whole."""
    made = layer()
    made.weight = nn.Parameter(made.weight[:24])
    made.bias = nn.Parameter(made.bias[:24])
    with pytest.raises(ConfigError) as caught:
        call(made, rows(16))
    assert str(caught.value) == (
        "train.precision: fp8 multiplies matrices whose sizes are divisible by 16, and a rank's part of one of 48 x 32 "
        "is 24 x 32: lower parallel.tensor, or take bf16-mixed"
    )


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_what_multiplies_is_seen(recipe: str) -> None:
    """In a layer of its own: emulated, or the kernel that the CPU has."""
    cpu = torch.device("cpu")
    assert kernel_on(cpu, recipe, emulate=True) == "emulated in fp32"


def test_the_kernel_of_the_device_is_seen() -> None:
    """The CPU has one for a scale of each tensor."""
    assert kernel_on(torch.device("cpu"), "tensorwise", emulate=False) == "torch._scaled_mm"
