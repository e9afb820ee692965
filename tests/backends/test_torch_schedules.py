"""Schedules interleaved and zerobubble: what they refuse, before a process starts and in a step."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from unipar_mesh.pipeline.stage import Arrival, Stage
from unipar_mesh.pipeline.torch_schedules import refuse_other_shapes
from unipar_mesh.refusal_sentences import refuse_part

import unipar
from unipar.backend import Micro, Part, registry
from unipar.config import Config
from unipar.distributed.mesh import Mesh, fake_groups
from unipar.errors import TaskError
from unipar.memory.recording.bytes_sent_recorder import CollectiveCounter


def config_of(**sections: Any) -> Config:
    given: dict[str, Any] = {
        "device": "cpu",
        "backend": "native",
        "parallel": {"data": 1, "pipeline": 2, "schedule": "interleaved"},
        "batch": {"total": 8, "micro": 2},
        "data": {"last_batch": "drop"},
        "train": {"steps": 1, "optimizer": {"lr": 0.1}},
    }
    return Config.model_validate(given | sections)


def refusals(**sections: Any) -> list[str]:
    return list(registry.find_backend("native").refuse(config_of(**sections)))


def test_what_they_run() -> None:
    """Four microbatches on two ranks under both, and three on four ranks, which are one round."""
    assert refusals() == []
    assert (
        refusals(parallel={"data": 2, "pipeline": 2, "schedule": "zerobubble"}, batch={"total": 16, "micro": 2}) == []
    )
    assert (
        refusals(parallel={"data": 1, "pipeline": 4, "schedule": "interleaved"}, batch={"total": 6, "micro": 2}) == []
    )


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        (
            {"data": {"last_batch": "keep"}},
            "parallel.schedule: interleaved needs microbatches of one shape, and data.last_batch: keep makes the last "
            "batch of an epoch smaller: set data.last_batch: drop, or take schedule 1f1b or gpipe",
        ),
        (
            {"batch": {"total": 10, "micro": 2}},
            "parallel.schedule: interleaved runs the microbatches of a step in equal rounds of 2 or more, one for each "
            "rank of the pipeline; there are 5, which are not 2 equal rounds: take a multiple of 2 (batch.total = data "
            "x micro x accumulate), or schedule 1f1b",
        ),
        (
            {"parallel": {"data": 1, "pipeline": 2, "context": 2, "schedule": "interleaved"}},
            "parallel.schedule: interleaved is not available with context: 2; take schedule 1f1b or gpipe",
        ),
        (
            {
                "parallel": {"data": 1, "pipeline": 2, "schedule": "zerobubble"},
                "model": {"recompute": "selective"},
            },
            "parallel.schedule: zerobubble is not available with model.recompute: selective: it runs two backwards "
            "through each block, one for gradients of inputs and one for those of weights, and torch allows one there; "
            "take recompute: blocks",
        ),
        (
            {
                "parallel": {"data": 1, "pipeline": 2, "schedule": "zerobubble"},
                "model": {"compile": {"what": "blocks"}},
            },
            "parallel.schedule: zerobubble is not available with model.compile: torch cannot split the backward of "
            "what is compiled into gradients of inputs and of weights; leave it out, or take schedule interleaved",
        ),
        (
            {"parallel": {"data": 2, "pipeline": 2, "expert": 2, "schedule": "zerobubble"}},
            "parallel.schedule: zerobubble is not available with expert: 2: it averages gradients over all ranks of "
            "the data at once, and ranks along expert hold different experts; take another schedule",
        ),
        (
            {"parallel": {"data": 1, "pipeline": 2, "shard": "parameters", "schedule": "zerobubble"}},
            "parallel.schedule: zerobubble is not available with parallel.shard: parameters: it computes gradients of "
            "weights apart from the backward in which FSDP2 would reduce them, so that they would stay empty; take "
            "shard nothing, or another schedule",
        ),
    ],
)
def test_refused_before_a_start(sections: dict[str, Any], sentence: str) -> None:
    """With the numbers, and what to do instead."""
    assert refusals(**sections) == [sentence]


def test_microbatches_of_other_shapes() -> None:
    """Torch receives into buffers of a fixed shape, where another one would end the rank."""
    micros = [Micro({"ids": torch.zeros(size, dtype=torch.int64)}, 0.5) for size in ((2, 8), (2, 8), (2, 6))]
    refuse_other_shapes("zerobubble", micros[:2])
    with pytest.raises(TaskError) as caught:
        refuse_other_shapes("zerobubble", micros)
    assert str(caught.value) == (
        "parallel.schedule: zerobubble needs microbatches of one shape: microbatch 2 of this step has (2, 6) of "
        "torch.int64, and microbatch 0 has (2, 8) of torch.int64; pad them alike, or use schedule 1f1b or gpipe, which "
        "take any"
    )


def test_fewer_blocks_than_stages() -> None:
    """A rank has two stages, so that two ranks need four blocks."""
    module = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
    part = Part("model", module, lambda m: torch.optim.SGD(m.parameters(), 0.1), ["0", "1", "2"])
    with pytest.raises(TaskError) as caught:
        refuse_part(part, config_of())
    assert str(caught.value) == (
        "parallel.pipeline: 4 stages (2 on each of 2 ranks, by interleaved) need a block each, and the model has 3 "
        "(0, 1, 2): lower pipeline, take schedule 1f1b, or name smaller blocks in model.blocks"
    )


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    "split",
    [
        pytest.param({"data": 1}, id="dropout"),
        pytest.param({"data": 2, "shard": "parameters"}, id="shapes new to one share", marks=pytest.mark.sweep),
    ],
)
def test_losses_are_those_of_one_process(split: dict[str, Any], tmp_path: Path) -> None:
    """Masks of dropout are the same, and all ranks find shapes again, as FSDP2 gathers on all or on none."""
    config = {
        "task": {"use": f"{Path(__file__).parents[1]}/support/pipelined.py:Skewed"},
        "device": "cpu",
        "batch": {"total": 4 * split["data"], "micro": 2},
        "data": {"last_batch": "drop", "shuffle": False},
        "train": {"steps": 2 * split["data"], "optimizer": {"name": "adamw", "lr": 0.01}, "seed": 3},
        "log": {"every": 1},
        "launch": {"heartbeat": 60},
    }
    parallel = {"pipeline": 2, "schedule": "interleaved", **split}
    one = unipar.launch({**config, "backend": "single", "out": str(tmp_path / "one")}, quiet=True)
    piped = unipar.launch({**config, "parallel": parallel, "out": str(tmp_path / "piped")}, quiet=True)
    assert [loss for _, loss in piped.losses] == pytest.approx([loss for _, loss in one.losses], rel=1e-6)


def test_blocks_that_do_not_run_are_not_gathered() -> None:
    """A stage passes by the blocks of its rank's other stage without FSDP2; behind it they are gathered as before."""
    mesh, traffic = Mesh.of(0, 2), Counter[tuple[str, str]]()
    counter = CollectiveCounter(traffic, mesh)
    with fake_groups(mesh) as groups:
        model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
        for block in model:
            fully_shard(block, mesh=groups.copies_and_shards(2), reshard_after_forward=True)
        stage = Stage(model, ["0", "1"], 1, 2)
        stage.inlet = lambda: Arrival(torch.ones(1, 2), None)
        with counter, torch.no_grad():
            stage.enter()
            stage.run(lambda model, batch: model(batch), model, torch.zeros(1, 2))
            stage.leave()
            assert counter.calls == {("data", "all_gather"): 1}
            model(torch.zeros(1, 2))
    assert counter.calls == {("data", "all_gather"): 3}
