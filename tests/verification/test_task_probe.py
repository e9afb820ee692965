"""The probe of a task: losses that depend on the cut, optimizers that need whole tensors, errors in one line."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from tests.conformance import tasks
from tests.support import special_tasks
from unipar.config import Config, Strategy
from unipar.config.settled import SettledConfig
from unipar.distributed.world import World
from unipar.launcher.in_process import SINGLE_PLACE
from unipar.task import Task
from unipar.verification.remarks import describe_task, kind_of_cut_dependence
from unipar.verification.worker.task_probe import (
    disable_dropout,
    error_in_one_line,
    optimizer_uses_whole_tensors,
    probe_task,
)

DOCUMENT = (Path(__file__).parents[2] / "docs" / "verify.md").read_text("utf-8")


def probed(task: Task) -> dict[str, Any]:
    """Return the facts about a task, on a microbatch of eight samples."""
    config = {"task": {"use": "x:X"}, "device": "cpu", "train": {"steps": 1, "precision": "fp64"}}
    settled = SettledConfig.of(
        Config.model_validate({**config, "batch": {"total": 8}, "parallel": {"data": 1}}), Strategy("single"), 1, "cpu"
    )
    return probe_task(task, settled, World(SINGLE_PLACE, torch.device("cpu"), None)) | {"quiet": [], "stream": False}


@pytest.mark.parametrize("balance", [0.001, 0.3])
def test_a_balance_of_experts_depends_on_the_cut(balance: float) -> None:
    """Also one of weight 0.001: its effect on an fp32 loss is rounded away, in the router's gradient it is large."""
    facts = probed(special_tasks.Balanced(balance))
    assert kind_of_cut_dependence(facts) == "samples combined"
    assert facts.get("gradient", "gate.weight") == "gate.weight"


def test_the_remark_on_a_small_term_names_the_gradient() -> None:
    """The losses themselves are equal to as many digits as are shown."""
    facts = probed(special_tasks.Balanced(1e-5))
    (remark,) = describe_task(facts)
    assert remark == (
        "the gradient of a batch is not the mean of its halves' gradients, although the losses are equal to rounding: "
        f"most of all that of gate.weight, by {facts['gradient_off']:.1e} of its norm; the loss has a small term that "
        "combines samples, as a balancing of experts does"
    )


@pytest.mark.parametrize(
    "task",
    [
        special_tasks.Balanced(0.0),
        tasks.Plain(tied=True),
        tasks.Tokens(),
        tasks.Distilled(),
        special_tasks.InSinglePrecision(),
    ],
    ids=lambda task: type(task).__name__,
)
def test_a_mean_over_samples_or_tokens_does_not(task: Task) -> None:
    """A batch in another order shows how far rounding moves each gradient."""
    facts = probed(task)
    assert (facts["apart"], facts.get("gradient")) == (False, None)


@pytest.mark.sweep
def test_the_router_of_mixtral() -> None:
    """Its kernel takes no fp64, so the probe is in fp32; without the auxiliary loss it is a mean over tokens."""
    from tests.support.transformer_models import Mixtral

    assert not probed(Mixtral())["apart"]
    facts = probed(Mixtral(output_router_logits=True, router_aux_loss_coef=0.001))
    assert facts["gradient"].endswith("mlp.gate.weight")


class _Scaled(torch.optim.Optimizer):
    """Optimizer whose step is as long as a share of the tensor: LARS, and LAMB, which divides by the moments first."""

    def __init__(self, groups: list[dict[str, Any]], *, moments: bool) -> None:
        super().__init__(groups, {"lr": 1e-2, "weight_decay": 0.0})
        self.moments = moments

    @override
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                update: Tensor = p.grad
                if self.moments:
                    state = self.state[p]
                    state["first"] = 0.9 * state.get("first", torch.zeros_like(p)) + 0.1 * p.grad
                    state["second"] = 0.99 * state.get("second", torch.zeros_like(p)) + 0.01 * p.grad.square()
                    update = state["first"] / (state["second"].sqrt() + 1e-6)
                p.sub_(update + group["weight_decay"] * p, alpha=group["lr"] * float(p.norm() / update.norm()))


def owning(optimizer: Callable[[Any], torch.optim.Optimizer]) -> tasks.Plain:
    class Owning(tasks.Plain):
        @override
        def optimizer(self, groups: Any) -> torch.optim.Optimizer:
            return optimizer(groups)

    return Owning()


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        ("LARS", partial(_Scaled, moments=False)),
        ("LAMB", partial(_Scaled, moments=True)),
        ("Muon", torch.optim.Muon),
        ("Adafactor", torch.optim.Adafactor),
    ],
)
def test_optimizers_that_need_whole_tensors(name: str, optimizer: Callable[[Any], torch.optim.Optimizer]) -> None:
    """Each is found by a step on a tensor and on its halves, and docs/verify.md names it as found."""
    assert optimizer_uses_whole_tensors(owning(optimizer))
    (bullet,) = (part for part in DOCUMENT.split("\n* ") if part.startswith("**An optimizer of the task**"))
    assert name in bullet


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.RMSprop, torch.optim.SGD, torch.optim.NAdam])
def test_optimizers_that_work_element_by_element(optimizer: Callable[[Any], torch.optim.Optimizer]) -> None:
    """A step on a tensor equals a step on its halves."""
    assert not optimizer_uses_whole_tensors(owning(optimizer))


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (RuntimeError("no Double\nException raised from check at File.cpp:1"), "RuntimeError: no Double"),
        (NotImplementedError(), "NotImplementedError"),
        (ValueError("a" * 300), "ValueError: " + "a" * 200 + "..."),
    ],
)
def test_an_error_in_one_line(error: Exception, line: str) -> None:
    """The class and the first line of its text, without the rest of what C++ adds."""
    assert error_in_one_line(error) == line


def test_dropout_of_a_model_in_eval_mode_is_disabled() -> None:
    """A model as from_pretrained returns it trains with its dropout, which a verification sets to 0."""
    task = tasks.Pretrained(dropout=0.3)
    names = disable_dropout(task)
    model: Any = task.model()
    assert names == ["dropout"]
    assert model.training
    assert model.dropout.p == 0.0


def test_a_trained_module_in_eval_mode_is_reported() -> None:
    """The remark names the modules whose dropout is off and whose statistics are fixed."""
    facts: dict[str, Any] = {"quiet": [], "stream": False, "parts": ["model"], "optimizer": False, "readable": True}
    facts |= {"draws": False, "apart": False, "trained_in_eval": ["norm1", "norm2"]}
    assert describe_task(facts) == [
        "trained modules are in eval mode (norm1, norm2): dropout inside is off, and BatchNorm uses its running "
        "statistics"
    ]
