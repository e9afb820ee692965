"""What a process can know by itself of a step."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from unipar.observing.process import script_checks as checks
from unipar.observing.process.script_state import ScriptState
from unipar.results.observed_rank import LocalFault


class Script:
    """A model that takes a step, as a script has it."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, x: Tensor | None = None) -> None:
        gc.collect()
        self.model, self.optimizer = model, optimizer
        self.state = ScriptState(())
        model(torch.ones(2, 2) if x is None else x).float().square().sum().backward()
        self.state.add(optimizer)

    def idle(self) -> list[LocalFault]:
        """Take the step and return what is found idle."""
        before = checks.digest_weights(self.state)
        norms, rates = checks.gradient_norms(self.optimizer), checks.learning_rates(self.optimizer)
        self.optimizer.step()
        for group in self.optimizer.param_groups:
            group["lr"] = 1.0  # as a schedule may change it before the step is compared
        return list(checks.find_idle_update(self.state, 2, norms, rates, before, checks.digest_weights(self.state)))


def linear(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(2, 3, dtype=dtype), nn.Linear(3, 1, dtype=dtype))


def only(faults: list[LocalFault]) -> LocalFault:
    """Return the one fault."""
    assert len(faults) == 1, faults
    return faults[0]


def test_an_update_has_an_effect() -> None:
    """A step of any usual rate changes the weights; a rate of 0 is meant."""
    for rate in (1e-3, 0.0):
        model = linear()
        assert Script(model, torch.optim.SGD(model.parameters(), lr=rate)).idle() == []


def test_an_update_that_is_too_small_for_bf16() -> None:
    """A weight in bf16 that a tiny rate leaves as it was is named, with its gradient's norm."""
    model = linear(torch.bfloat16)
    script = Script(model, torch.optim.Adam(model.parameters(), lr=1e-7), torch.ones(2, 2, dtype=torch.bfloat16))
    fault = only(script.idle())
    assert (fault.kind, fault.step, fault.parameter) == ("update without effect", 2, "0.weight")
    assert fault.detail.startswith("the update left 0.weight as it was, though its gradient's norm is ")
    assert fault.detail.endswith(" and the learning rate 1e-07")


def test_an_update_that_changes_nothing_in_fp32() -> None:
    """In fp32 it is a fault if no weight has changed, and rounding if another one has."""
    model = linear()
    script = Script(model, torch.optim.SGD(model.parameters(), lr=1e-30))
    assert only(script.idle()).parameter == "0.weight"
    model = linear()
    groups = [{"params": model[0].parameters(), "lr": 1e-30}, {"params": model[1].parameters(), "lr": 0.1}]
    assert Script(model, torch.optim.SGD(groups)).idle() == []


def test_a_group_with_a_rate_of_zero() -> None:
    """Weights whose own rate is 0 are meant to stay, in bf16, too."""
    model = linear(torch.bfloat16)
    groups = [{"params": model[0].parameters(), "lr": 0.0}, {"params": model[1].parameters(), "lr": 0.5}]
    assert Script(model, torch.optim.SGD(groups), torch.ones(2, 2, dtype=torch.bfloat16)).idle() == []


def test_weights_outside_the_optimizer() -> None:
    """Weights that get gradients and that no optimizer has are named; frozen ones get none."""
    model = linear()
    script = Script(model, torch.optim.SGD(model[0].parameters()))
    fault = only(list(checks.find_weights_outside(script.state, 2)))
    assert (fault.kind, fault.parameter) == ("weights outside the optimizer", "1.weight")
    assert fault.detail == "1.weight, 1.bias got gradients and no optimizer has them"
    frozen = linear()
    frozen[1].requires_grad_(False)
    script = Script(frozen, torch.optim.SGD(frozen[0].parameters()))
    assert list(checks.find_weights_outside(script.state, 2)) == []


def test_an_optimizer_of_a_copy() -> None:
    """An optimizer of an old copy holds tensors that no model has; a library's copies get gradients."""
    model, copy = linear(), linear()
    script = Script(model, torch.optim.SGD(copies := [p.detach() for p in copy.parameters()]))
    assert only(list(checks.find_weights_outside(script.state, 2))).detail == (
        "0.weight, 0.bias, 1.weight and 1 more got gradients and no optimizer has them, while the optimizer has 4 "
        "tensors that no model has"
    )
    copies[0].grad = torch.ones_like(copies[0])
    assert list(checks.find_weights_outside(script.state, 2)) == []


def test_weights_in_a_coarse_dtype() -> None:
    """An optimizer of bf16 weights is found, unless its state has exact copies or the weights are frozen."""
    model = linear(torch.bfloat16)
    script = Script(model, torch.optim.SGD(model.parameters()), torch.ones(2, 2, dtype=torch.bfloat16))
    fault = only(list(checks.find_coarse_dtypes(script.state, 2)))
    assert (fault.kind, fault.parameter) == ("coarse dtype", "0.weight")
    assert fault.detail == ("the optimizer updates 0.weight in bfloat16, without an fp32 copy: small updates are lost")
    for p in model.parameters():
        script.optimizer.state[p]["master_param"] = p.float()
    assert list(checks.find_coarse_dtypes(script.state, 2)) == []
    script.optimizer.state.clear()
    for p in model.parameters():
        p.requires_grad_(False).grad = None
    assert list(checks.find_coarse_dtypes(script.state, 2)) == []


def test_an_optimizer_state_in_a_coarse_dtype() -> None:
    """A state in bf16 of fp32 weights is found; one of 8 bits is a quantized optimizer's."""
    model = linear()
    script = Script(model, torch.optim.SGD(model.parameters()))
    state = script.optimizer.state[next(model.parameters())]
    state["exp_avg"] = torch.zeros(3, 2, dtype=torch.bfloat16)
    assert only(list(checks.find_coarse_dtypes(script.state, 2))).detail == (
        "0.weight is float32, and the optimizer keeps its exp_avg in bfloat16"
    )
    state["exp_avg"] = torch.zeros(3, 2, dtype=torch.float8_e4m3fn)
    assert list(checks.find_coarse_dtypes(script.state, 2)) == []


def test_digests_of_a_state() -> None:
    """One changed element changes the digest of its weight, buffer or state alone."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    script = Script(model, torch.optim.Adam(model.parameters()))
    gradients = checks.digest_gradients(script.state, script.optimizer)
    assert list(gradients) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    script.optimizer.step()
    first = checks.digest_state(script.state, 2, gradients)
    with torch.no_grad():
        model.get_parameter("0.weight")[0, 0] += 1e-6
        model.get_buffer("1.running_mean")[0] += 1
        script.optimizer.state[model.get_parameter("1.bias")]["exp_avg"][0] += 1
    second = checks.digest_state(script.state, 2, gradients)
    changed = [
        [name for name, digest in getattr(first, what).items() if getattr(second, what)[name] != digest]
        for what in ("weights", "buffers", "states", "gradients")
    ]
    assert changed == [["0.weight"], ["1.running_mean"], ["exp_avg of 1.bias"], []]


def test_gradients_of_one_of_two_optimizers() -> None:
    """Gradients that another optimizer will be given are not reduced yet, perhaps, and are left out."""
    model = linear()
    script = Script(model, torch.optim.SGD(model[0].parameters()))
    script.state.add(other := torch.optim.SGD(model[1].parameters()))
    assert list(checks.digest_gradients(script.state, script.optimizer)) == ["0.weight", "0.bias"]
    assert list(checks.digest_gradients(script.state, other)) == ["1.weight", "1.bias"]


@pytest.mark.parametrize(
    ("model", "x"),
    [
        (nn.Embedding(4, 2, sparse=True), torch.tensor([1, 2])),
        (nn.Linear(2, 2, dtype=torch.complex64), torch.ones(1, 2, dtype=torch.complex64)),
    ],
    ids=["sparse", "complex"],
)
def test_unusual_gradients(model: nn.Module, x: Tensor) -> None:
    """Sparse and complex gradients have norms and digests."""

    class Real(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        @override
        def forward(self, x: Tensor) -> Tensor:
            out = self.inner(x)
            return torch.view_as_real(out) if out.is_complex() else out

    outer = Real()
    script = Script(outer, torch.optim.SGD(outer.parameters(), lr=0.1), x)
    assert all(norm > 0 for norm in checks.gradient_norms(script.optimizer).values())
    assert len(checks.digest_gradients(script.state, script.optimizer)) == len(list(outer.parameters()))
    assert script.idle() == []


def test_weights_of_eight_bits_have_digests() -> None:
    """Torch cannot combine floats of 8 bits; their bytes are."""
    model = nn.Linear(2, 2)
    model.register_buffer("scaled", torch.ones(3000).to(torch.float8_e4m3fn))
    script = Script(model, torch.optim.SGD(model.parameters()))
    assert list(checks.digest_state(script.state, 1, {}).buffers) == ["scaled"]


def test_norms_and_dropout_of_the_trained_model() -> None:
    """Batch norms that see one rank's samples, and dropout, count where they train."""

    def found(**changes: Any) -> tuple[tuple[str, ...], bool]:
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, **changes), nn.Dropout(0.5))
        script = Script(model, torch.optim.SGD(model.parameters()))
        training = checks.unsynced_batch_norms(script.state), checks.has_dropout(script.state)
        model.eval()
        assert (checks.unsynced_batch_norms(script.state), checks.has_dropout(script.state)) == ((), False)
        return training

    assert found() == (("1",), True)
    assert found(track_running_stats=False) == ((), True)
    synced = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(2))).train()
    other = linear()
    script = Script(other, torch.optim.SGD([*other.parameters(), *synced.parameters()]))
    assert checks.unsynced_batch_norms(script.state) == ()
