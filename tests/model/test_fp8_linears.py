"""Which linear layers multiply in fp8, and how one that does not is found."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from unipar.config import Config
from unipar.errors import ConfigError, Inconsistent
from unipar.model import fp8_linears
from unipar.model.fp8_linears import Fp8Linears, choose_kernel, convert_to_fp8, fp8_linears_of

CPU = torch.device("cpu")
EMULATED = "emulated in fp32"


class Block(nn.Module):
    """A block with a layer of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.small = nn.Linear(32, 64), nn.Linear(64, 32), nn.Linear(32, 8)
        self.attention = nn.MultiheadAttention(32, 2)

    @override
    def forward(self, x: Tensor) -> Tensor:
        self.small(x)
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    """Two such blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(32, 32)

    @override
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def in_fp8(model: nn.Module, blocks: tuple[str, ...] = ("blocks.0", "blocks.1"), precision: str = "fp8") -> Fp8Linears:
    """The layers of a model, converted."""
    config = {"backend": "single", "batch": {"total": 4, "micro": 4}, "train": {"steps": 1, "precision": precision}}
    convert_to_fp8(model, blocks, Config.model_validate(config), EMULATED)
    found = fp8_linears_of(model)
    assert found is not None
    return found


def forward(model: nn.Module, *, autocast: bool = True) -> None:
    """A forward under the run's autocast."""
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        model(torch.ones(16, 32))


def test_layers_of_blocks_multiply_in_fp8() -> None:
    """Not those with a size that 16 does not divide, with a forward of their own, or outside of blocks."""
    found = in_fp8(Model())
    assert list(found.linears) == ["blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down"]
    assert found.describe() == (
        "fp8 (tensorwise, emulated in fp32) in 4 of 9 linear layers: blocks.*.up, blocks.*.down; in bf16: "
        "blocks.*.small (32 to 8, not divisible by 16), blocks.*.attention.out_proj (NonDynamicallyQuantizableLinear "
        "with a forward of its own), head (outside of blocks)"
    )
    assert in_fp8(Model(), precision="fp8-rowwise").describe().startswith("fp8 (rowwise, emulated in fp32) in 4 of 9")


def test_the_last_layer_of_a_model_without_blocks_stays() -> None:
    """It is the head."""
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
    assert (
        in_fp8(model, ()).describe()
        == "fp8 (tensorwise, emulated in fp32) in 1 of 2 linear layers: 0; in bf16: 2 (the last)"
    )


def test_layers_stay_the_modules_that_they_are() -> None:
    """With their parameters, and hooks that others have set."""
    model, calls = Model(), list[str]()
    up: Any = model.blocks[0].up
    before = dict(model.named_parameters())

    def called(*_: Any) -> None:
        calls.append("called")

    up.register_forward_hook(called)
    in_fp8(model)
    forward(model)
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is p for name, p in before.items())
    assert model.get_submodule("blocks.0.up") is up
    assert calls == ["called"]


def test_other_precisions_change_nothing() -> None:
    """A model in bf16-mixed keeps its classes."""
    model = Model()
    config = {"backend": "single", "batch": {"total": 4, "micro": 4}, "train": {"steps": 1, "precision": "bf16-mixed"}}
    convert_to_fp8(model, (), Config.model_validate(config), EMULATED)
    assert fp8_linears_of(model) is None
    assert type(model.head) is nn.Linear


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (
            nn.Sequential(nn.Linear(10, 32), nn.Linear(32, 32)),
            "train.precision: fp8 multiplies in the linear layers of blocks whose sizes are both divisible by 16, and "
            "none of the model's 2 linear layers is one: 0 (10 to 32, not divisible by 16), 1 (the last); choose other "
            "sizes, name the blocks in model.blocks, or take bf16-mixed",
        ),
        (
            nn.Sequential(nn.Conv1d(3, 3, 3)),
            "train.precision: fp8 multiplies in the linear layers of blocks whose sizes are both divisible by 16, and "
            "none of the model's 0 linear layers is one; choose other sizes, name the blocks in model.blocks, or take "
            "bf16-mixed",
        ),
    ],
    ids=["sizes", "none"],
)
def test_a_model_without_a_layer_for_fp8_is_refused(model: nn.Module, text: str) -> None:
    """With the sizes of its layers."""
    with pytest.raises(ConfigError) as caught:
        in_fp8(model, ())
    assert str(caught.value) == text


def test_layers_that_multiplied_in_fp8_are_counted() -> None:
    """One that nothing calls, as of another stage, is not among them."""
    model = Model()
    found = in_fp8(model)
    with torch.autocast("cpu", torch.bfloat16):
        model.blocks[0](torch.ones(16, 32))
    assert found.check(model, CPU) == "2 of 4 linear layers ran emulated in fp32"
    assert found.observed(model) == ({"blocks.0.up": EMULATED, "blocks.0.down": EMULATED}, [])


def call_with_weight(model: Any) -> None:
    """Use a weight without its layer."""
    block = model.blocks[1]

    def by_hand(x: Tensor) -> Tensor:
        return block.down(functional.linear(x, block.up.weight))

    block.forward = by_hand
    forward(model)


def call_in_full(model: Any) -> None:
    """Switch autocast off around a block."""
    block, plain = model.blocks[1], model.blocks[1].forward

    def whole(x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return plain(x.float())

    block.forward = whole
    forward(model)


def replace_layer(model: Any) -> None:
    """Put another layer in the place of one."""
    model.blocks[1].up = nn.Linear(32, 64)
    forward(model)


def fall_back(model: Any) -> None:
    """Have torchao multiply in bf16."""
    from torchao.float8 import float8_linear

    name = "matmul_with_hp_or_float8_args"
    plain = getattr(float8_linear, name)

    def in_bf16(x: Tensor, weight: Tensor, *_: Any) -> Tensor:
        return x @ weight.to(x.dtype)

    setattr(float8_linear, name, SimpleNamespace(apply=in_bf16))
    try:
        forward(model)
    finally:
        setattr(float8_linear, name, plain)


@pytest.mark.parametrize(
    ("plant", "text"),
    [
        (
            call_with_weight,
            "1 linear layer did not multiply in fp8: blocks.1.up was not called, and its weight was used",
        ),
        (
            call_in_full,
            "2 linear layers did not multiply in fp8: blocks.1.up was called where autocast is off; blocks.1.down was "
            "called where autocast is off",
        ),
        (replace_layer, "1 linear layer did not multiply in fp8: blocks.1.up has become a Linear"),
        (
            fall_back,
            "4 linear layers did not multiply in fp8: blocks.0.up multiplied in bfloat16; blocks.0.down multiplied in "
            "bfloat16; blocks.1.up multiplied in bfloat16; and 1 more",
        ),
    ],
)
def test_a_layer_that_leaves_fp8_is_an_error(plant: Any, text: str) -> None:
    """However it leaves."""
    model = Model()
    found = in_fp8(model)
    plant(model)
    way_out = "; call each layer itself, under the run's autocast, or take bf16-mixed"
    with pytest.raises(Inconsistent) as caught:
        found.check(model, CPU)
    assert str(caught.value) == f"train.precision: fp8, and {text}{way_out}"


def test_another_kernel_than_the_devices_is_an_error() -> None:
    """Such as an emulated product where the device has its own."""
    model = Model()
    found = in_fp8(model)
    forward(model)
    own = Fp8Linears("tensorwise", "torch._scaled_mm", False, dict(list(found.linears.items())[:1]))
    with pytest.raises(Inconsistent, match=r"blocks\.0\.up ran emulated in fp32, not torch\._scaled_mm; call"):
        own.check(model, CPU)


def test_compiled_layers_are_said_to_be_unobserved() -> None:
    """A layer of its own shows what multiplies."""
    model = Model()
    config = {"backend": "single", "batch": {"total": 4, "micro": 4}, "model": {"compile": True}}
    config |= {"train": {"steps": 1, "precision": "fp8"}}
    convert_to_fp8(model, ("blocks.0", "blocks.1"), Config.model_validate(config), EMULATED)
    found = fp8_linears_of(model)
    assert found is not None
    assert found.check(model, CPU) == (
        "4 of 4 linear layers compiled, where products are not observed; such a layer alone ran emulated in fp32"
    )


def test_products_are_emulated_on_the_cpu() -> None:
    """Which has no fast ones."""
    assert choose_kernel(CPU) == EMULATED


def test_a_gpu_that_cannot_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products in fp8 begin with compute capability 8.9."""
    monkeypatch.setattr(fp8_linears, "device_name", Mock(return_value="NVIDIA A100-SXM4-80GB"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", Mock(return_value=(8, 0)))
    with pytest.raises(ConfigError) as caught:
        choose_kernel(torch.device("cuda:0"))
    assert str(caught.value) == (
        "train.precision: fp8 needs a GPU of compute capability 8.9 or more, and NVIDIA A100-SXM4-80GB has 8.0: take "
        "bf16-mixed, or try fp8 with device: cpu, where it is emulated"
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", Mock(return_value=(8, 9)))
    assert choose_kernel(torch.device("cuda:0")) == "torch._scaled_mm"
    with pytest.raises(ConfigError, match="fp8-rowwise needs CUDA, or the CPU for trials, and this is mps: take bf16"):
        choose_kernel(torch.device("mps"), "fp8-rowwise")
