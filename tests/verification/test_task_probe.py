"""The probe of a task: optimizers that need whole tensors are found, and errors are told in one line."""

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
from unipar.verification.remarks import describe_task
from unipar.verification.worker.task_probe import disable_dropout, error_in_one_line, optimizer_uses_whole_tensors

DOCUMENT = (Path(__file__).parents[2] / "docs" / "verify.md").read_text("utf-8")


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
