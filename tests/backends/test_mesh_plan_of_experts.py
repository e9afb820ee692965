"""Experts over ranks as `unipar plan` has them: found by shapes, with as many rows on each rank or with all on one."""

from __future__ import annotations

from typing import Any

import pytest
from unipar_mesh.expert.small_blocks import small_blocks

import unipar
from tests.support.expert_models import WIDTH
from tests.support.world import ROOT
from unipar.backend.offered_strategies import config_in_strategy, expand_strategy_patterns
from unipar.config import Config
from unipar.config.config_source import load_given_config
from unipar.errors import TaskError
from unipar.prediction.request import PredictionRequest
from unipar.prediction.timeline import CommVolume
from unipar.training.fake_run.task_traces import PredictedStep, TaskTraces

ROWS = 12 * 2
"""Rows of a sample: its words, for each of two experts."""

SENT = ROWS * (WIDTH + 1) * 4
"""Bytes of a sample's rows, with the weight of each, to the ranks of their experts."""

EXPERTS_OF_LAYER = 8 * 3 * 48 * WIDTH * 4
"""Bytes of a layer's experts."""


def given(kernel: str = "grouped_mm", name: str = "Mixtral") -> dict[str, Any]:
    task = {
        "use": f"{ROOT}/tests/support/expert_models.py:OfTransformers",
        "args": {"name": name, "kernel": kernel, "auxiliary": False},
    }
    return {"task": task, "device": "cpu", "batch": {"total": 8, "micro": 2}, "train": {"steps": 1}}


@pytest.fixture(scope="module")
def traces() -> TaskTraces:
    return TaskTraces(load_given_config(given()).config, 2)


def in_strategy(name: str, ranks: int, task: dict[str, Any] | None = None) -> Config:
    (strategy,) = expand_strategy_patterns((name,))
    return config_in_strategy(load_given_config({**(task or given()), "parallel": {"data": ranks}}).config, strategy)


def step_of(traces: TaskTraces, name: str, ranks: int, **batch: int) -> PredictedStep:
    config = in_strategy(name, ranks).changed({f"batch.{key}": size for key, size in batch.items()})
    data = config.parallel.data
    assert isinstance(data, int)
    return traces.predict(PredictionRequest(config, ranks, config.batch.settle(data), "cpu"))


def test_each_rank_has_a_part_of_the_experts(traces: TaskTraces) -> None:
    """Layers of experts are groups of their own, before their block; all else is whole."""
    (traced,) = traces.of(in_strategy("native/nothing+expert2", 2))
    shapes = {p.name: p.shape for p in traced.timeline.parameters}
    assert shapes["model.layers.1.mlp.experts.gate_up_proj"] == (4, 96, WIDTH)
    assert shapes["model.layers.1.mlp.gate.weight"] == (8, WIDTH)
    assert traced.timeline.blocks == (
        "model.layers.0.mlp.experts",
        "model.layers.0",
        "model.layers.1.mlp.experts",
        "model.layers.1",
    )
    assert traced.timeline.experts == {0, 2}


def test_rows_travel_there_and_back(traces: TaskTraces) -> None:
    """Rows go there with their weights, rows come back, gradients the other way; numbers of rows go once."""
    (traced,) = traces.of(in_strategy("native/nothing+expert4", 4))
    ((axis, collective, base, slope, calls, ranks),) = [
        (s.axis, s.collective, s.base, s.slope, s.calls, s.ranks) for s in traced.sent
    ]
    assert (axis, collective, calls, ranks) == ("expert", "all_to_all", 2 * 5, 4)
    back = ROWS * WIDTH * 4
    assert (base, slope) == (2 * 8 * 8, 2 * 2 * (SENT + back))


def test_tokens_of_experts_are_added_up_at_logged_steps(traces: TaskTraces) -> None:
    """If each step is logged: 3 numbers of each of two layers, and one of each of their 8 experts, in 8 bytes."""

    def reduced(every: int) -> tuple[int, int]:
        config = in_strategy("native/nothing+expert2", 2).changed({"log.every": every})
        step = traces.predict(PredictionRequest(config, 2, config.batch.settle(2), "cpu"))
        reduced = [volume for volume in step.sent if volume.collective == "all_reduce"]
        return sum(volume.size for volume in reduced), sum(volume.calls for volume in reduced)

    (more, calls), (size, few) = reduced(1), reduced(10)
    assert (more - size, calls - few) == (2 * 8 + 8 * 2 * (3 + 8), 1 + 2)


def test_all_rows_to_one_rank_need_more(traces: TaskTraces) -> None:
    """The plan says what a microbatch allocates if they are even, and if one rank gets those of all."""
    for ranks in (2, 4):
        (traced,) = traces.of(in_strategy(f"native/nothing+expert{ranks}", ranks))
        assert traced.worst_routing is not None
        assert max(traced.worst_routing.levels(2)) > max(traced.activations.levels(2))
    two, four = traces.notes_on_experts()
    assert two.startswith("expert2: planned is that each rank's experts get as many rows as it sends; a microbatch")
    assert two.endswith("if one rank's experts get the rows of all 2")
    assert four.endswith("if one rank's experts get the rows of all 4")


def test_a_model_without_experts_over_ranks_has_no_note() -> None:
    """Nothing is assumed of a strategy that leaves all experts on each rank."""
    alone = TaskTraces(load_given_config(given()).config, 2)
    alone.of(in_strategy("native/nothing", 2))
    assert list(alone.notes_on_experts()) == []


def test_experts_are_reduced_among_ranks_that_have_the_same(traces: TaskTraces) -> None:
    """Of four ranks, two have the same experts, each second one; all four have the same of all else, in one group:
    little is in a block besides experts."""
    sent = step_of(traces, "native/nothing+expert2", 4).sent
    size = sum(p.size for p in traces.whole.timeline.parameters)
    experts = 2 * EXPERTS_OF_LAYER
    assert [s for s in sent if s.axis == "data" and s.size > 16] == [
        CommVolume("data", "all_reduce", size - experts, 1, 4, 1),
        CommVolume("data", "all_reduce", experts // 2, 2, 2, 2),
    ]


def test_experts_of_one_rank_are_sent_to_nobody(traces: TaskTraces) -> None:
    """Where each rank has other experts, FSDP2 gathers and reduces only what lies around them."""
    step = step_of(traces, "native/parameters+expert2", 2)
    rest = sum(p.size for p in traces.whole.timeline.parameters) - 2 * EXPERTS_OF_LAYER
    (reduced,) = [s for s in step.sent if s.collective == "reduce_scatter"]
    padded = rest + 2 * WIDTH * 4  # rows of two tables of 61 words
    assert (reduced.size, reduced.ranks) == (2 * padded, 2)
    assert step.phases[-1].held["parameters"] == padded // 2 + EXPERTS_OF_LAYER


def test_experts_of_one_rank_are_held_once(traces: TaskTraces) -> None:
    """They are not gathered, and their gradients are added up in place; where two ranks have the same, FSDP2 gathers
    them."""
    rest = sum(p.size for p in traces.whole.timeline.parameters) - 2 * EXPERTS_OF_LAYER
    own = rest + EXPERTS_OF_LAYER
    for ranks, gathered in ((2, rest), (4, own)):
        _, forward, _, update, _ = step_of(traces, "native/nothing+expert2", ranks).phases
        assert (forward.held["communication"], update.held["gradients"]) == (gathered, own)


def test_blocks_in_which_little_is_besides_experts() -> None:
    """Up to 1 MiB in fp32; a block without experts is a group of FSDP2's whatever its size."""
    sizes = {"layers.1": 2**18, "layers.10": 2**18, "layers.2": 2**18 + 1}
    assert small_blocks(sizes, ["layers.1.mlp.experts", "layers.2.mlp.experts"]) == {"layers.1"}


def test_groups_that_are_freed_after_their_forward(traces: TaskTraces) -> None:
    """Under `parameters` each block stays a group, however small: three are gathered, and again in backward."""
    sent = step_of(traces, "native/parameters+expert2", 2, total=4).sent
    assert [s.calls for s in sent if s.collective == "all_gather"] == [3 + 3]


def test_kernels_that_need_values() -> None:
    """A loop over experts runs on the numbers that even rows have."""
    task = given(kernel="eager")
    traces = TaskTraces(load_given_config(task).config, 2)
    (traced,) = traces.of(in_strategy("native/nothing+expert2", 2, task))
    assert traced.timeline.experts == {0, 2}
    assert [s.slope for s in traced.sent] == [2 * 2 * (SENT + ROWS * WIDTH * 4)]


def test_what_divides_no_experts_is_refused(traces: TaskTraces) -> None:
    """As in training, with sizes that do."""
    with pytest.raises(TaskError) as e:
        traces.of(in_strategy("native/nothing+expert3", 3))
    assert str(e.value) == (
        "parallel.expert: 3: model.layers.0.mlp.experts: 3 ranks do not divide its 8 experts: take one of 2, 4, 8"
    )


def test_the_proof_adds_up_gradients(traces: TaskTraces) -> None:
    """Rank 0 keeps the whole model's gradients of one microbatch while it computes those of another."""

    def built(name: str) -> int:
        (first, *_) = step_of(traces, name, 2, total=64, micro=32).phases
        assert first.phase == "built"
        return first.peak

    size = sum(p.size for p in traces.whole.timeline.parameters)
    assert built("native/nothing+expert2") == built("native/nothing+context2") + size


LISTED = {**given(), "task": {"use": f"{ROOT}/tests/support/expert_models.py:OfUser", "args": {"kind": "list"}}}


def test_lists_of_experts() -> None:
    """Each of a rank's experts is a group; the others' are not there, and rows are spread evenly."""
    traces = TaskTraces(load_given_config(LISTED).config, 2)
    (traced,) = traces.of(config := in_strategy("native/parameters+expert2", 2, LISTED))
    own = [f"layers.0.mixture.experts.{number}" for number in range(4)]
    assert traced.timeline.blocks[:5] == (*own, "layers.0")
    assert traced.timeline.experts == {0, 1, 2, 3, 5, 6, 7, 8}
    assert [p.name for p in traced.timeline.parameters if p.name.startswith("layers.0.mixture.experts.")] == [
        f"{expert}.{name}" for expert in own for name in ("0.weight", "0.bias", "2.weight", "2.bias")
    ]
    assert [(s.axis, s.slope, s.calls) for s in traced.sent] == [("expert", 2 * 2 * 2 * ROWS * WIDTH * 4, 2 * 5)]
    step = traces.predict(PredictionRequest(config, 2, config.batch.settle(2), "cpu"))
    expert = 4 * (2 * 24 * WIDTH + 24 + WIDTH)
    rest = sum(p.size for p in traces.whole.timeline.parameters) - 2 * 8 * expert
    padded = rest + (WIDTH + 1) * 4 + WIDTH * 4  # rows of two tables and of a bias of 61 words
    assert step.phases[-1].held["parameters"] == padded // 2 + 2 * 4 * expert


def test_lists_of_experts_that_are_not_planned() -> None:
    """Matrices around them are found by a run without values; and a number of ranks must divide them."""
    traces = TaskTraces(load_given_config(LISTED).config, 2)
    with pytest.raises(TaskError) as tensor:
        traces.of(in_strategy("native/nothing+tensor2+expert2", 4, LISTED))
    assert str(tensor.value) == (
        "plan: the experts layers.0.mixture.experts are a list of modules, which get their rows by value, and a plan "
        "under parallel.tensor knows experts with stacked parameters: measure it (unipar compare)"
    )
    with pytest.raises(TaskError, match=r"^parallel.expert: 3: layers.0.mixture.experts: 3 ranks do not divide its 8 "):
        traces.of(in_strategy("native/nothing+expert3", 3, LISTED))


def test_attention_that_does_not_run_on_a_part_is_refused() -> None:
    """A plan of context says which block it is, and what its attention must be."""
    task = given()
    task["task"]["args"]["attention"] = "eager"
    sentence = (
        "parallel.context: model.layers.0 does not run on 6 positions, a rank's part (Attempting to broadcast a "
        "dimension of length 12 at -1! Mismatching argument at index 1 had torch.Size([2, 1, 6, 12]); but expected "
        "shape should be broadcastable to [2, 4, 6, 6]): attention must be torch's scaled_dot_product_attention "
        '(transformers: attn_implementation="sdpa"), and what goes along the sequence an argument of the block'
    )
    (row,) = unipar.plan(task, strategies=["native/nothing+context2+expert2"], worlds=[4]).rows
    assert row.refusal == sentence


def test_attention_is_computed_again_in_the_same_way() -> None:
    """Under recompute, the way that auto has chosen with a mask of all positions, which are cut by then."""
    task: dict[str, Any] = {**given(), "model": {"recompute": "blocks"}}
    task["task"]["args"] |= {"attention": "sdpa", "num_attention_heads": 8, "num_key_value_heads": 2}
    (row,) = unipar.plan(task, strategies=["native/nothing+context2"], worlds=[2]).rows
    assert not row.refusal
    (sent,) = [each.calls for each in row.sent if (each.axis, each.collective) == ("context", "all_to_all")]
    assert sent == 4 * 2 * 2 * 3  # microbatches, blocks, both ways; forward, again, backward
