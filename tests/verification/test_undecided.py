"""Routers that rounding decides: strategies run once more with the experts of one process, and are judged by that."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from tests.support.expert_models import WIDTH, OfUser
from tests.support.forks import Forks
from tests.support.verifications import verified
from unipar.verification.worker.best_choices import BestChoices

HERE = Path(__file__)


class UndecidedRouter(nn.Linear):
    """Router whose first two scores differ by less than rounding does, the other way round on several ranks."""

    @override
    def forward(self, input: Tensor) -> Tensor:
        scores = super().forward(input)
        several = dist.is_initialized() and dist.get_world_size() > 1
        bias = torch.tensor([0.5, 0.5, 1.5, *[0.0] * (scores.shape[-1] - 5), -1.0, -1.0]).to(scores.dtype)
        bias[1] += 1e-6 if several else -1e-6
        return torch.cat([scores[..., :1], scores[..., :1], scores[..., 2:]], -1) + bias


class Undecided(OfUser):
    """A user's mixture with such routers."""

    @override
    def model(self) -> nn.Module:
        net: Any = super().model()
        for layer in net.layers:
            layer.mixture.router = UndecidedRouter(WIDTH, self.number)
        return net


class HalvedGradients(Undecided):
    """The same, trained on several ranks with half of the loss."""

    @override
    def loss(self, model: Any, batch: Any) -> Tensor:
        several = dist.is_initialized() and dist.get_world_size() > 1
        return super().loss(model, batch) * (0.5 if several and model.training else 1.0)


STRATEGIES = ("native/nothing", "native/nothing+expert2")


def rows_of(
    forks: Forks, folder: Path, task: str, strategies: Sequence[str] = STRATEGIES
) -> tuple[int, str, dict[str, Any]]:
    """Return exit code, summary and rows of a verification."""
    done, said = verified(forks, folder, f"{HERE}:{task}", strategies, steps=2, backend="faulty")
    return done.returncode, said["summary"], {row["strategy"]: row for row in said["strategies"]}


def test_a_router_that_rounding_decides(tmp_path: Path, forks: Forks) -> None:
    """Strategies agree with one process, but for the tokens that go to another expert; the exit code is 0."""
    code, summary, rows = rows_of(forks, tmp_path, "Undecided")
    tokens = rows["native/nothing"]["undecided"]
    assert code == 0
    assert summary == (
        f"all 2 strategies agree with one process over 2 steps on 2 ranks, but for {tokens} tokens whose router is "
        "undecided"
    )
    assert {(row["outcome"], row["undecided"], row["finding"]) for row in rows.values()} == {("agrees", tokens, None)}
    assert 0 < tokens < 2 * 2 * 16 * 12


def test_a_fault_beside_an_undecided_router(tmp_path: Path, forks: Forks) -> None:
    """It still disagrees with the experts of one process, and the finding says so."""
    code, _, rows = rows_of(forks, tmp_path, "HalvedGradients", STRATEGIES[:1])
    finding = rows["native/nothing"]["finding"]
    assert (code, finding["kind"]) == (1, "a near-tie of a router")
    assert re.search(
        r"; with the experts of one process it disagrees all the same: loss at step \d is off by \S+, \S+ is allowed$",
        finding["says"],
    )


class Chooser(nn.Module):
    """Module that chooses two of its scores a row, in a module of it."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Identity()

    @override
    def forward(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        values, chosen = self.router(scores).topk(2, -1)
        return values, chosen


def choose(choices: BestChoices, scores: Tensor) -> tuple[Tensor, Tensor]:
    model = nn.ModuleDict({"mixture": Chooser()})
    with choices.of_microbatch(model, 1, 3):
        return model["mixture"](scores)


@pytest.mark.parametrize(("gap", "followed"), [(0.5e-4, True), (2e-4, False)])
def test_near_ties_alone_are_followed(gap: float, followed: bool) -> None:
    """A choice is that of the other run where scores are equal up to rounding, with the scores and gradients of it."""
    recorded = BestChoices()
    choose(recorded, torch.tensor([[0.5, 1.0, 0.4], [3.0, 2.0, 1.0]]))
    assert {place: each.tolist() for place, each in recorded.steps[0].items()} == {"3/mixture#1": [[1, 0], [0, 1]]}
    following = BestChoices(recorded.steps)
    scores = torch.tensor([[0.5, 1.0, 0.5 + gap], [1.0, 2.0, 3.0]], requires_grad=True)
    values, chosen = choose(following, scores)
    values.sum().backward()
    assert scores.grad is not None
    assert chosen.tolist() == [[1, 0] if followed else [1, 2], [2, 1]]
    assert values.tolist() == scores.gather(-1, chosen).tolist()
    assert scores.grad.tolist() == [[1.0, 1.0, 0.0] if followed else [0.0, 1.0, 1.0], [0.0, 1.0, 1.0]]
    assert following.moved == ({"1/3/mixture#1": 1} if followed else {})
