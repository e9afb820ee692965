"""Linear layers that multiply in fp8, by torchao: which they are, and whether each did.

Their weights stay in fp32 and are cast, with a scale, for each product. torchao is imported when a config asks for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, cast

import torch
from torch import nn

from unipar.backend.precision import FP8_MULTIPLE, FP8_RECIPES
from unipar.config import Config
from unipar.distributed.device import device_name
from unipar.errors import ConfigError, Inconsistent
from unipar.utils.text import count_of, first_few, patterns_of

Kernel = Literal["torch._scaled_mm", "emulated in fp32"]
"""Product that multiplies: the device's own one of fp8 numbers, or one in fp32 of numbers that were rounded to fp8."""

OLDEST_CAPABILITY: Final = (8, 9)
"""Compute capability of the first NVIDIA GPUs (Ada) with products in fp8."""

_ON_ROOT: Final = "unipar_fp8"
"""Attribute of a model in which its fp8 linears are noted."""


@dataclass(frozen=True)
class Fp8Linears:
    """Linear layers of a model that multiply in fp8, and why others do not."""

    recipe: str
    """tensorwise: a scale for each tensor; rowwise: one for each row."""

    kernel: Kernel
    compiled: bool
    """Whether what multiplies is compiled, so that it is not observed."""

    linears: Mapping[str, nn.Linear]
    left: Mapping[str, str] = field(default_factory=dict[str, str])
    """Reason why a linear layer is not among them, by its name."""

    def describe(self) -> str:
        """Return which linears multiply in fp8, and which do not, as a sentence."""
        number = len(self.linears) + len(self.left)
        return (
            f"fp8 ({self.recipe}, {self.kernel}) in {len(self.linears)} of {count_of(number, 'linear layer')}: "
            f"{patterns_of(self.linears)}{self._describe_left()}"
        )

    def _describe_left(self) -> str:
        reasons = dict.fromkeys(self.left.values())
        each = [f"{patterns_of(n for n, why in self.left.items() if why == reason)} ({reason})" for reason in reasons]
        return f"; in bf16: {', '.join(each)}" if each else ""

    def observed(self, model: nn.Module) -> tuple[dict[str, str], list[str]]:
        """Return the kernel that each linear ran in its first forward, and a sentence for each that left fp8.

        A linear that nothing has used, as those of another stage, is in neither.
        """
        ran: dict[str, str] = {}
        wrong: list[str] = []
        for name, linear in self.linears.items():
            why = _why_not_fp8(model, name, linear)
            if why is not None:
                wrong.append(f"{name} {why}")
            elif kernel := self.kernel if self.compiled else vars(linear).get("kernel"):
                ran[name] = kernel
        return ran, wrong

    def check(self, model: nn.Module, device: torch.device) -> str:
        """Return what the linears ran in the first step as a sentence; raise Inconsistent if one has left fp8."""
        ran, wrong = self.observed(model)
        if self.compiled and not wrong:
            wrong += self._check_alone(device)
        wrong += [f"{name} ran {kernel}, not {self.kernel}" for name, kernel in ran.items() if kernel != self.kernel]
        if wrong:
            layers, more = count_of(len(wrong), "linear layer"), f"; and {len(wrong) - 3} more" if wrong[3:] else ""
            raise Inconsistent(
                f"train.precision: {self.recipe_precision}, and {layers} did not multiply in fp8: "
                f"{'; '.join(wrong[:3])}{more}; call each layer itself, under the run's autocast, or take bf16-mixed"
            )
        layers = f"{len(ran)} of {count_of(len(self.linears), 'linear layer')}"
        if self.compiled:
            return f"{layers} compiled, where products are not observed; such a layer alone ran {self.kernel}"
        return f"{layers} ran {self.kernel}"

    def _check_alone(self, device: torch.device) -> list[str]:
        """Return a sentence if a layer of its own, which is not compiled, does not multiply in fp8."""
        from unipar.model.fp8_linear import kernel_on

        ran = kernel_on(device, self.recipe, emulate=self.kernel != "torch._scaled_mm")
        return [] if ran == self.kernel else [f"a layer of its own ran {ran or 'no product in fp8'}"]

    @property
    def recipe_precision(self) -> str:
        """Value of `train.precision`."""
        return next(precision for precision, recipe in FP8_RECIPES.items() if recipe == self.recipe)


def convert_to_fp8(
    module: nn.Module, blocks: Sequence[str], config: Config, kernel: Kernel, *, planned: bool = False
) -> None:
    """Let linear layers multiply in fp8 if the config's precision is fp8; raise ConfigError if none of them can.

    They are those of blocks; of a model without blocks, all but the last, which is its head. They stay the modules that
    they are, with their names, parameters and hooks. `planned`: they are without values.
    """
    recipe = FP8_RECIPES.get(config.train.precision)
    if recipe is None:
        return
    from unipar.model.fp8_linear import make_fp8

    every = {name: m for name, m in module.named_modules() if isinstance(m, nn.Linear)}
    reasons = {name: _why_left(name, m, blocks, list(every)[-1]) for name, m in every.items()}
    linears = {name: m for name, m in every.items() if not reasons[name]}
    if not linears:
        raise ConfigError(
            f"train.precision: {config.train.precision} multiplies in the linear layers of blocks whose sizes are both "
            f"divisible by {FP8_MULTIPLE}, and none of the model's {count_of(len(every), 'linear layer')} is one"
            + (f": {first_few([f'{name} ({why})' for name, why in reasons.items()])}" if every else "")
            + "; choose other sizes, name the blocks in model.blocks, or take bf16-mixed"
        )
    compiled = config.model.compiling is not None
    make_fp8(list(linears.values()), recipe, emulate=kernel != "torch._scaled_mm", observed=not (compiled or planned))
    left = {name: why for name, why in reasons.items() if why}
    module.__dict__[_ON_ROOT] = Fp8Linears(recipe, kernel, compiled, linears, left)


def fp8_linears_of(module: nn.Module) -> Fp8Linears | None:
    """Return the linear layers of a model that multiply in fp8; None if its precision is another."""
    return cast("Fp8Linears | None", module.__dict__.get(_ON_ROOT))


def choose_kernel(device: torch.device, precision: str = "fp8") -> Kernel:
    """Return what multiplies fp8 numbers on a device; raise ConfigError if none can: only the CPU emulates them."""
    if device.type == "cpu":
        return "emulated in fp32"
    if device.type != "cuda":
        raise ConfigError(
            f"train.precision: {precision} needs CUDA, or the CPU for trials, and this is {device.type}: "
            "take bf16-mixed"
        )
    capability = torch.get_device_module(device).get_device_capability(device)
    if torch.version.hip is None and capability < OLDEST_CAPABILITY:
        wanted, own = (".".join(map(str, each)) for each in (OLDEST_CAPABILITY, capability))
        raise ConfigError(
            f"train.precision: {precision} needs a GPU of compute capability {wanted} or more, and "
            f"{device_name(device)} has {own}: take bf16-mixed, or try fp8 with device: cpu, where "
            "it is emulated"
        )
    return "torch._scaled_mm"


def _why_left(name: str, linear: nn.Linear, blocks: Sequence[str], last: str) -> str:
    """Return why a linear layer does not multiply in fp8; "" if it does."""
    if blocks and not any(f"{name}.".startswith(f"{block}.") for block in blocks):
        return "outside of blocks"
    if not blocks and name == last:
        return "the last"
    if type(linear) is not nn.Linear or "forward" in linear.__dict__:
        return f"{type(linear).__name__} with a forward of its own"
    if linear.in_features % FP8_MULTIPLE or linear.out_features % FP8_MULTIPLE:
        return f"{linear.in_features} to {linear.out_features}, not divisible by {FP8_MULTIPLE}"
    return ""


def _why_not_fp8(model: nn.Module, name: str, linear: Any) -> str | None:
    """Return how a layer has left fp8; None if it has multiplied in fp8, or has not been used."""
    try:
        now = model.get_submodule(name)
    except AttributeError:
        return None  # of another stage
    if now is not linear or type(now) is nn.Linear:
        used = any(True for _ in now.parameters(recurse=False))
        return f"has become a {type(now).__name__}" if used else None
    own = vars(linear)
    return None if own.get("kernel") else own.get("left_by")
