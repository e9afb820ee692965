"""Near-ties of routers in the proof before the first step."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from unipar_mesh.expert.expert_layer import ExpertLayer
from unipar_mesh.proof.router_ties import RouterTies

import unipar
from tests.backends.test_expert_parallel import config_of
from tests.support.expert_models import WIDTH, StackedExperts
from unipar.engines.router_choices import RouterChoice


@pytest.mark.usefixtures("forked")
def test_the_proof_says_which_tokens_tie(tmp_path: Path) -> None:
    """Rounding moves a token of the proof's microbatches; the split model is no other for that."""
    config = config_of(tmp_path, "Tied", {}, {"expert": 2})
    assert len(unipar.launch(config, quiet=True).losses) == 3
    logs = [(Path(config["out"]) / f"rank-{rank}.log").read_text("utf-8") for rank in (0, 1)]
    said = re.findall(
        r"near-ties of routers: the split model chooses another expert for (\d+) tokens? in "
        r"layers\.1\.mixture\.experts, whose weight differs by \d\.\de[-+]\d+ at most, which is rounding and no "
        r"fault; it was compared with the experts of the full model\n",
        logs[0],
    )
    assert (len(said), logs[1].count("near-ties")) == (1, 0)


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
    model = torch.nn.ModuleDict({"experts": StackedExperts(4)})
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
