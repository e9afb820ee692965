"""Near-ties of routers in the proof before the first step."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override
from unipar_mesh.expert.expert_layer import ExpertLayer
from unipar_mesh.proof.router_ties import RouterTies

import unipar
from tests.support.expert_models import WIDTH, OfUser, StackedExperts
from unipar.engines.router_choices import RouterChoice
from unipar.errors import TaskError


def config_of(folder: Path, task: str) -> dict[str, Any]:
    return {
        "task": {"use": task},
        "device": "cpu",
        "parallel": {"data": 2, "expert": 2},
        "batch": {"total": 8, "micro": 2},
        "train": {"steps": 3, "optimizer": {"name": "adamw", "lr": 1e-2}, "clip": 0.5},
        "log": {"every": 1},
        "out": str(folder / "run"),
    }


@pytest.mark.usefixtures("forked")
def test_the_proof_says_which_tokens_tie(tmp_path: Path) -> None:
    """Rounding moves a token of the proof's microbatches; the split model is no other for that."""
    config = config_of(tmp_path, "tests.support.expert_models:Tied")
    assert len(unipar.launch(config, quiet=True).losses) == 3
    logs = [(Path(config["out"]) / f"rank-{rank}.log").read_text("utf-8") for rank in (0, 1)]
    said = re.findall(
        r"near-ties of routers: the split model chooses another expert for (\d+) tokens? in "
        r"layers\.1\.mixture\.experts, whose weight differs by \d\.\de[-+]\d+ at most, which is rounding and no "
        r"fault; it was compared with the experts of the full model\n",
        logs[0],
    )
    assert (len(said), logs[1].count("near-ties")) == (1, 0)


class RankRouter(nn.Linear):
    """Router whose scores depend on the rank."""

    @override
    def forward(self, input: Tensor) -> Tensor:
        scores = super().forward(input)
        return scores + (dist.get_rank() if dist.is_initialized() else 0) * torch.linspace(0, 3, scores.shape[-1])


class ByRank(OfUser):
    """A user's mixture with such routers."""

    @override
    def model(self) -> nn.Module:
        net: Any = super().model()
        for layer in net.layers:
            layer.mixture.router = RankRouter(WIDTH, self.number)
        return net


@pytest.mark.usefixtures("forked")
def test_a_router_that_depends_on_the_rank(tmp_path: Path) -> None:
    """The refusal says which router, and how many tokens it sends elsewhere."""
    sentence = (
        r"^split as planned, the model is another: a loss of .*; expert 2; on rank 1 the router before "
        r"layers\.0\.mixture\.experts chooses other experts for \d+ of 24 tokens than on rank 0 with the full model, "
        r"and rounding does not explain it: what it computes must not depend on the rank\. "
    )
    with pytest.raises(TaskError, match=sentence):
        unipar.launch(config_of(tmp_path, f"{Path(__file__)}:ByRank"), quiet=True)


class World:
    """The only rank."""

    rank = 0

    def gather_objects(self, mine: Any, root: int) -> list[Any]:
        return [mine]

    def tell_objects(self, value: Any, root: int) -> Any:
        return value


@pytest.mark.parametrize(("weight", "allowed"), [(0.25, (0.25, 0.25)), (0.2500001, (0.25, 0.25)), (0.251, (0.0, 0.0))])
def test_a_wider_gap_is_no_tie(weight: float, allowed: tuple[float, float]) -> None:
    """Experts are those of the full model where weights are equal up to rounding; else they stay, and nothing more is
    allowed."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"experts": StackedExperts(4)})
    rows, numbers = torch.randn(2, WIDTH), torch.tensor([[0, 1], [2, 3]])
    split = torch.tensor([[0.75, 0.25], [0.75, weight]])
    full = RouterChoice(torch.tensor([[0, 1], [2, 1]]), torch.tensor([[0.75, 0.25], [0.75, 0.25]]))
    ties = RouterTies({"experts": full}, [ExpertLayer("experts", "stacked", 4)])
    with ties.followed(model):
        out = model["experts"](rows, numbers, split)
    wanted = full.experts if allowed[1] else numbers
    torch.testing.assert_close(out, model["experts"](rows, wanted, split))
    world: Any = World()
    assert ties.allowed(world) == allowed
