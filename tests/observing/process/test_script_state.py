"""Models and optimizers of a script, found without a change of it."""

from __future__ import annotations

import gc
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Subset, TensorDataset

from unipar.observing.process.script_state import ScriptState, is_sharded, own_name, seat_in_mesh


def model_of(*names: str) -> nn.Sequential:
    model = nn.Sequential()
    for name in names:
        model.add_module(name, nn.Linear(2, 2))
    return model


def names_of(state: ScriptState) -> list[str]:
    return [name for name, _ in state.named_parameters(trained=True)]


@pytest.fixture
def state() -> ScriptState:
    gc.collect()
    return ScriptState(())


def test_the_model_of_an_optimizer(state: ScriptState) -> None:
    """The outermost module is the model; others that are alive do not train."""
    wrapped = SimpleNamespace(model=model_of("a", "b"))
    outer = nn.ModuleDict({"module": wrapped.model})
    other = model_of("other")
    optimizer = torch.optim.SGD(wrapped.model.parameters())
    state.add(optimizer)
    assert state.trained == [outer]
    assert any(model is other for model in state.models)
    assert names_of(state) == ["a.weight", "a.bias", "b.weight", "b.bias"]
    assert state.optimizers == [optimizer]
    assert state.knows(optimizer)
    assert not state.knows(torch.optim.SGD(other.parameters()))


def test_models_in_the_order_of_their_optimizers(state: ScriptState) -> None:
    """Equal names of two models are told apart by the order of the optimizers, whatever was made first."""
    generator, judge = model_of("a"), model_of("a")
    optimizers = [torch.optim.SGD(judge.parameters()), torch.optim.SGD(generator.parameters())]
    for optimizer in optimizers:
        state.add(optimizer)
    assert state.trained == [judge, generator]
    assert names_of(state) == ["a.weight", "a.bias", "a.weight of model 1", "a.bias of model 1"]


def test_copies_do_not_train(state: ScriptState) -> None:
    """A copy for averages, and a model through which gradients flow, are not compared between ranks."""
    model, judge = model_of("a"), model_of("a")
    judge(model(torch.ones(1, 2))).sum().backward()
    copies = [deepcopy(model), torch.optim.swa_utils.AveragedModel(model)]
    state.add(optimizer := torch.optim.SGD(model.parameters()))
    assert optimizer.param_groups
    assert state.trained == [model]
    assert {id(other) for other in [judge, *copies]} <= {id(m) for m in state.models}
    assert [name for name, _ in state.named_buffers()] == []


def test_frozen_and_tied_weights(state: ScriptState) -> None:
    """Frozen weights of a model that trains belong to it; a weight with two names has the first one."""
    model = model_of("a", "b", "c")
    nn.Module.__setattr__(model.get_submodule("c"), "weight", model.get_submodule("a").weight)
    model.get_submodule("a").requires_grad_(False)
    state.add(optimizer := torch.optim.SGD(model.get_submodule("b").parameters()))
    assert optimizer.param_groups
    assert names_of(state) == ["a.weight", "a.bias", "b.weight", "b.bias", "c.bias"]


def test_a_model_whose_weights_only_have_gradients(state: ScriptState) -> None:
    """If the optimizer has other tensors, the model is that whose weights have gradients."""
    model, other = model_of("a"), model_of("a")
    model(torch.ones(1, 2)).sum().backward()
    old = deepcopy(model)
    state.add(optimizer := torch.optim.SGD(list(old.parameters())))
    del old
    gc.collect()
    state.add(optimizer)
    assert (state.trained, any(m is other for m in state.models)) == ([model], True)
    assert [name for name, _ in state.masters()] == ["optimizer 0[0]", "optimizer 0[1]"]


def test_states_of_an_optimizer_by_name(state: ScriptState) -> None:
    """Each tensor of the optimizer's state has the name of its parameter."""
    model = model_of("a")
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state.add(optimizer)
    assert [(name, key) for name, key, _ in state.named_states()] == [
        (f"a.{name}", key) for name in ("weight", "bias") for key in ("step", "exp_avg", "exp_avg_sq")
    ]


def test_what_the_script_drops_is_forgotten(state: ScriptState) -> None:
    """Nothing that the script has dropped is kept alive."""
    model = model_of("a")
    optimizer = torch.optim.SGD(model.parameters())
    state.add(optimizer)
    del model, optimizer
    gc.collect()
    assert (state.trained, state.optimizers) == ([], [])


def test_tensors_of_datasets(state: ScriptState) -> None:
    """Tensors of a dataset, and of those that it is made of, are no unknown memory, as long as the script has them."""
    inputs, targets = torch.zeros(4, 2), torch.zeros(4)
    part = Subset(TensorDataset(inputs, targets), [1, 3])
    part.again = part  # pyright: ignore[reportAttributeAccessIssue]
    state.add_dataset(part)
    state.add_dataset([inputs])
    kept = [holding for holding in state.holdings() if holding.name == "dataset"]
    assert [(holding.category, holding.tensor.data_ptr()) for holding in kept] == [
        ("runtime", inputs.data_ptr()), ("runtime", targets.data_ptr())
    ]  # fmt: skip
    del part, kept
    gc.collect()
    assert [holding for holding in state.holdings() if holding.name == "dataset"] == []


def test_own_names() -> None:
    """What wrappers add to a name is left out, wherever it stands."""
    assert own_name("_orig_mod.module.blocks.0._checkpoint_wrapped_module.weight") == "blocks.0.weight"
    assert own_name("_fsdp_wrapped_module.a.bias") == "a.bias"
    assert own_name("my_module.weight") == "my_module.weight"
    assert own_name("module") == "module"


@pytest.mark.parametrize(
    ("attributes", "sharded"),
    [
        ({}, False),
        ({"ds_id": 3}, True),
        ({"_sharded_size": 3}, True),
        ({"_fsdp_flattened": True}, True),
        ({"tensor_model_parallel": True}, True),
        ({"tensor_model_parallel": False}, False),
        ({"allreduce": False}, True),
        ({"allreduce": True}, False),
    ],
)
def test_parameters_of_which_ranks_hold_parts(attributes: dict[str, Any], sharded: bool) -> None:
    """Libraries mark parameters that ranks do not hold alike."""
    parameter = nn.Parameter(torch.zeros(2))
    for name, value in attributes.items():
        setattr(parameter, name, value)
    assert (is_sharded(parameter), seat_in_mesh(parameter)) == (sharded, "")
