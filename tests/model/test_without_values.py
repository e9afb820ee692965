"""A model on fake tensors: constructors that run on them, and those that need values."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from unipar.errors import TaskError
from unipar.model import without_values
from unipar.model.without_values import create_without_values

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

SIZES = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
LLAMA = transformers.LlamaConfig(**SIZES, vocab_size=8)


def vit() -> nn.Module:
    return transformers.ViTForImageClassification(transformers.ViTConfig(**SIZES, image_size=8, patch_size=4))


def lora() -> Any:
    base: Any = transformers.AutoModelForCausalLM.from_config(LLAMA, dtype=torch.bfloat16)
    return peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))


def converted() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to("cpu", dtype=torch.bfloat16)


def within_bounds() -> nn.Module:
    layer = nn.Linear(2, 2)
    nn.init.trunc_normal_(layer.weight)
    nn.init.trunc_normal_(layer.bias, a=1.5, b=2.0)
    return layer


def by_a_number() -> nn.Module:
    return nn.Sequential(*(nn.Linear(2, round(x)) for x in torch.linspace(2, 4, 3).tolist()))


def from_numpy() -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.register_buffer("scale", torch.from_numpy(torch.ones(3).numpy()))
    return layer


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, torch.tensor([2.0]).numpy().astype(int).item()))
    shared = nn.Parameter(torch.ones(2, 2))
    model[0].weight = model[1].weight = shared
    return model


def by_its_parameters() -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.register_buffer("largest", torch.tensor(layer.weight.detach().abs().max().item()))
    return layer


def shape_of(model: Any) -> list[tuple[Any, ...]]:
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return [(name, tuple(x.shape), x.dtype, x.requires_grad, x.device) for name, x in tensors]


@pytest.mark.parametrize(
    ("make", "calls", "allocated"),
    [
        (vit, 1, 0),
        (lora, 1, 0),
        (converted, 1, 0),
        (within_bounds, 1, 0),
        (by_a_number, 2, 0),
        (from_numpy, 2, 0),
        (tied, 2, 0),
        (by_its_parameters, 3, 24),
    ],
)
def test_a_model_without_values(make: Callable[[], Any], calls: int, allocated: int) -> None:
    """It has the names, shapes, dtypes and ties of the one with values, and no tensor with values; how often it ran."""
    made_by: list[int] = []

    def counted() -> Any:
        made_by.append(1)
        return make()

    model, took = create_without_values(counted, FakeTensorMode(allow_non_fake_inputs=True))
    assert shape_of(model) == shape_of(make())
    assert all(isinstance(x, FakeTensor) for x in (*model.parameters(), *model.buffers()))
    assert len(list(model.parameters())) == len(list(make().parameters()))
    assert (len(made_by), took) == (calls, allocated)


def test_parameters_become_fake_at_once() -> None:
    """Where a constructor reads numbers, at most one parameter at a time has values; marks of parameters stay."""
    seen: list[type[Tensor]] = []

    class Marked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            weight = nn.Parameter(torch.ones(round(torch.linspace(2, 3, 2).tolist()[1])))
            setattr(weight, "no_decay", True)  # noqa: B010
            self.weight = weight
            seen.append(type(self.weight))

    model, _ = create_without_values(Marked, FakeTensorMode(allow_non_fake_inputs=True))
    assert (seen, model.weight.no_decay) == ([FakeTensor], True)


def test_parts_and_random_numbers() -> None:
    """Parts by name are fake too; what a constructor draws here does not change what the process draws next."""
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    parts, took = create_without_values(
        lambda: {"a": by_its_parameters(), "b": nn.Linear(1, 1)}, FakeTensorMode(allow_non_fake_inputs=True)
    )
    assert torch.equal(torch.rand(1), expected)
    assert took == 32
    assert all(isinstance(x, FakeTensor) for part in parts.values() for x in part.parameters())


def test_a_model_that_takes_too_much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that needs its parameters' values is refused before it takes more than half of what is left."""
    monkeypatch.setattr(without_values, "available_memory_bytes", lambda: 40)
    with pytest.raises(TaskError, match=re.escape("plan: model() cannot be created without values (")) as caught:
        create_without_values(by_its_parameters, FakeTensorMode(allow_non_fake_inputs=True))
    assert str(caught.value).endswith(
        "_local_scalar_dense.default), and with values it takes more than 20 B, half of the memory that is left here: "
        "let it choose by shapes, or plan on a machine with more memory"
    )


def test_an_error_of_the_model() -> None:
    """An error of model() is raised as it is, and torch is as it was."""
    before = nn.Module.register_parameter, torch.utils.swap_tensors, nn.init.trunc_normal_
    with pytest.raises(ValueError, match="mine"):
        create_without_values(lambda: Path(_raise("mine")), FakeTensorMode(allow_non_fake_inputs=True))
    assert (nn.Module.register_parameter, torch.utils.swap_tensors, nn.init.trunc_normal_) == before


def _raise(words: str) -> str:
    raise ValueError(words)
