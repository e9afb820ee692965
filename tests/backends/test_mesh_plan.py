"""Ranks of a mesh as `unipar plan` has them: the engine's own splits on tensors without values, without peers."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from typing_extensions import override

import unipar
from tests.support.short_text import ShortText, short_text
from unipar.backend import registry
from unipar.backend.offered_strategies import config_in_strategy, expand_strategy_patterns
from unipar.config import BatchSizes, Config
from unipar.config.config_source import load_given_config
from unipar.distributed.mesh import Mesh, fake_groups
from unipar.errors import TaskError
from unipar.prediction.request import PredictionRequest
from unipar.prediction.timeline import CommVolume, StepTimeline, TurnOfStep
from unipar.training.fake_run.task_traces import PredictedStep, TaskTraces
from unipar.training.fake_run.trace_task import TracedTask

HIDDEN = 8 * 16 * 4
"""Bytes of a sample's hidden states."""

STATE = 5056
"""Bytes of a generator's state."""

HEADER = 12 * 8 + STATE
"""Bytes of a message before hidden states: numbers, and the state of a generator."""

TIED = 96 * 16 * 4
"""Bytes of the embedding, which is the head as well."""


class Encoded(ShortText):
    """One layer of torch's own, whose attention keeps its projections itself."""

    @override
    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Embedding(96, 16), nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True), nn.Linear(16, 96)
        )

    @override
    def blocks(self, model: nn.Module) -> list[str]:
        return ["1"]


@pytest.fixture(scope="module")
def given() -> dict[str, Any]:
    return {"task": short_text(layers=3), "device": "cpu", "batch": {"total": 8, "micro": 2}, "train": {"steps": 1}}


@pytest.fixture(scope="module")
def traces(given: dict[str, Any]) -> TaskTraces:
    return TaskTraces(load_given_config(given).config, 2)


def in_strategy(name: str, ranks: int) -> Config:
    (strategy,) = expand_strategy_patterns((name,))
    given = {"task": {"use": "small.py:Small"}, "batch": {"total": 8, "micro": 2}, "train": {"steps": 1}}
    return config_in_strategy(load_given_config({**given, "parallel": {"data": ranks}}).config, strategy)


def sent(traced: TracedTask) -> dict[tuple[str, str], tuple[float, float, int]]:
    return {(one.axis, one.collective): (one.base, one.slope, one.calls) for one in traced.sent}


def step_of(traces: TaskTraces, name: str, ranks: int) -> PredictedStep:
    config = in_strategy(name, ranks)
    data = config.parallel.data
    assert isinstance(data, int)
    return predicted(traces, config, ranks, config.batch.settle(data))


def predicted(traces: TaskTraces, config: Config, ranks: int, sizes: BatchSizes) -> PredictedStep:
    return traces.predict(PredictionRequest(config, ranks, sizes, "cpu"))


def test_matrices_over_two_ranks(traces: TaskTraces) -> None:
    """Each rank has half of a block's matrices, and adds up twice in forward and in backward of each block."""
    (traced,) = traces.of(in_strategy("native/nothing+tensor2", 2))
    shapes = {p.name: p.shape for p in traced.timeline.parameters}
    assert shapes["layers.1.qkv.weight"] == (24, 16)
    assert shapes["layers.1.mlp.2.weight"] == (16, 32)
    assert shapes["token.weight"] == (96, 16)
    assert sent(traced) == {("tensor", "all_reduce"): (0.0, 3 * 4 * HIDDEN, 3 * 4)}
    assert traced.activations.flops[1] < traces.whole.activations.flops[1]
    assert not dist.is_initialized()


def test_sequences_between_matrices(traces: TaskTraces) -> None:
    """Inputs are gathered, and again for the backward; gradients of what works on parts are added up."""
    (traced,) = traces.of(in_strategy("native/nothing+tensor2+sequence", 2))
    norms = 3 * (4 * 16 + 16) * 4
    assert sent(traced) == {
        ("tensor", "all_gather"): (0.0, (3 * 6 + 2) * HIDDEN, 3 * 6 + 2),
        ("tensor", "reduce_scatter"): (0.0, 3 * 4 * HIDDEN, 3 * 4),
        ("tensor", "all_reduce"): (norms, 0.0, 3 * 5),
    }


def test_two_stages(traces: TaskTraces) -> None:
    """The second has fewer blocks, and the head, which is tied to the embedding of the first: both have it."""
    first, second = traces.of(in_strategy("native/nothing+pipeline2", 2))
    assert (first.timeline.blocks, second.timeline.blocks) == (("layers.0", "layers.1"), ("layers.2",))
    names = [{p.name: p.stages for p in traced.timeline.parameters} for traced in (first, second)]
    assert "place.weight" in names[0]
    assert "place.weight" not in names[1]
    assert names[0]["token.weight"] == names[1]["token.weight"] == 2
    assert sent(first) == {("pipeline", "send"): (HEADER, HIDDEN, 2)}
    assert sent(second) == {("pipeline", "send"): (0.0, HIDDEN, 1)}
    assert (first.rank.whole.sent_on, second.rank.whole.sent_back) == ((0, HIDDEN), (0, HIDDEN))


@pytest.mark.parametrize(
    ("attention", "sent_by_attention"),
    [
        ("gather", {"all_gather": (0.0, 3 * 2 * 2 * HIDDEN, 6), "reduce_scatter": (0.0, 3 * 2 * HIDDEN, 3)}),
        ("ulysses", {"all_to_all": (0.0, 3 * 2 * 2 * HIDDEN, 3 * 2 * 2)}),
        ("auto", {"all_to_all": (0.0, 3 * 2 * 2 * HIDDEN, 3 * 2 * 2)}),
    ],
)
def test_a_sequence_in_two_parts(
    traces: TaskTraces, attention: str, sent_by_attention: dict[str, tuple[float, float, int]]
) -> None:
    """Keys and values are gathered in forward and backward, or a rank's half of four tensors is traded for heads.

    Hidden states are gathered behind the last block.
    """
    config = in_strategy("native/nothing+context2", 2).changed({"options": {"native": {"attention": attention}}})
    (traced,) = traces.of(config)
    found = sent(traced)
    behind: dict[str, tuple[float, float, int]]
    behind = {"all_gather": (0.0, HIDDEN, 1), "reduce_scatter": (0.0, HIDDEN, 1)}
    for name, (base, slope, calls) in sent_by_attention.items():
        _, more, again = behind.get(name, (0.0, 0.0, 0))
        behind[name] = (base, slope + more, calls + again)
    assert found == {("context", name): volume for name, volume in behind.items()}


def test_a_step_of_eight_ranks(traces: TaskTraces) -> None:
    """FSDP2 gathers and reduces what a rank has of its stage, over the data; all add up the norm."""
    step = step_of(traces, "native/parameters+tensor2+pipeline2", 8)
    blocks = 2 * (3 * 16 * 16 + 16 * 16 + 2 * 64 * 16 + 64 + 2 * (4 * 16 + 16)) // 2 * 4
    rest = TIED + 8 * 16 * 4
    assert step.sent == (
        CommVolume("pipeline", "all_reduce", TIED // 2, 1, 2),
        CommVolume("all ranks", "all_reduce", 8, 1, 8),
        CommVolume("data", "all_gather", 2 * 2 * (blocks + rest), 2 * 2 * 3, 2),
        CommVolume("data", "reduce_scatter", 2 * (blocks + rest), 2 * 3, 2),
        CommVolume("tensor", "all_reduce", 2 * 2 * 2 * 4 * HIDDEN, 2 * 2 * 4, 2),
        CommVolume("pipeline", "send", 2 * (HEADER + 2 * HIDDEN), 2 * 2, 2),
    )
    held = step.phases[-1].held
    assert held["parameters"] == (blocks + rest) // 2
    assert [phase.phase for phase in step.phases] == ["built", "forward", "backward", "update", "steady"]


def test_fsdp_beside_tensor_and_stages(traces: TaskTraces) -> None:
    """What copies have reduced stays to the end of backward; behind a backward nothing is gathered ahead."""
    config = in_strategy("native/parameters+tensor2+pipeline2", 8)
    timeline = replace(traces.of(config)[0].timeline, microbatches=2)
    predict = registry.find_backend("native").predict

    def spans(timeline: StepTimeline, name: str) -> list[tuple[int, int | None]]:
        terms = predict(config, timeline, 8, device="cpu").terms
        return [(term.first, term.until) for term in terms if term.name == name]

    end = timeline.at("update")
    assert spans(timeline, "layers.1 reduced") == [(timeline.at("backward", "finish", 1), end)]
    ahead = timeline.at("backward", "enter", 1), timeline.at("backward", "reach", 0)
    assert ahead in spans(timeline, "layers.0 all-gather")
    later = replace(timeline, turn=TurnOfStep("backward", 0, 1, "backward"))
    late = timeline.at("backward", "reach", 0), timeline.at("backward", "enter", 0)
    assert ahead not in spans(later, "layers.0 all-gather")
    assert late in spans(later, "layers.0 all-gather")


def test_more_in_flight_needs_more(traces: TaskTraces) -> None:
    """gpipe keeps all four microbatches, 1f1b two of them."""
    one, all_of_them = (step_of(traces, f"native/nothing+pipeline2{how}", 2) for how in ("", "+gpipe"))
    kept = [
        next(term.size for term in step.phases[1].terms if term.name == "microbatches in flight")
        for step in (one, all_of_them)
    ]
    assert kept[1] == 3 * kept[0]


def test_what_the_proof_holds_before_the_first_step(traces: TaskTraces) -> None:
    """Rank 0 has the whole model, and its gradients, those of one block, or its part, by options.native.proof."""

    def built(proof: str) -> dict[str, int]:
        config = in_strategy("native/nothing+context2", 2).changed({"options": {"native": {"proof": proof}}})
        (first, *_) = predicted(traces, config, 2, config.batch.settle(1).with_micro(1)).phases
        assert first.phase == "built"
        return {term.name: term.size for term in first.terms}

    model, gradients = "whole model, of rank 0", "gradients that prove that the split model is the same"
    blocks, off = built("blocks"), built("off")
    size = sum(p.size for p in traces.whole.timeline.parameters)
    assert blocks[model] == off[model] == size
    assert 0 < blocks[gradients] < size
    assert off["its part"] == size  # along the context every rank has the whole


@pytest.fixture(scope="module")
def traces_of_four(given: dict[str, Any]) -> TaskTraces:
    return TaskTraces(load_given_config({**given, "task": short_text(layers=4)}).config, 2)


def test_two_stages_on_each_of_two_ranks(traces_of_four: TaskTraces) -> None:
    """The first rank has every second block; hidden states and a generator's state go on in a ring."""
    first, second = traces_of_four.of(in_strategy("native/nothing+pipeline2+interleaved", 2))
    assert (first.timeline.blocks, second.timeline.blocks) == (("layers.0", "layers.2"), ("layers.1", "layers.3"))
    names = [{p.name: p.stages for p in traced.timeline.parameters} for traced in (first, second)]
    assert names[0]["token.weight"] == names[1]["token.weight"] == 2
    assert "place.weight" not in names[1]
    assert sent(first) == {("pipeline", "send"): (2 * STATE, 3 * HIDDEN, 2 * 2 + 1)}
    assert sent(second) == {("pipeline", "send"): (STATE, 3 * HIDDEN, 2 + 2)}
    assert [(stage.sent_on, stage.sent_back, stage.received) for stage in first.rank.stages] == [
        ((STATE, HIDDEN), (0, 0), (0, HIDDEN)),
        ((STATE, HIDDEN), (0, HIDDEN), (0, 2 * HIDDEN)),
    ]


def test_halves_of_a_backward(traces_of_four: TaskTraces) -> None:
    """Until gradients of weights are computed more is kept than after a forward; the first stage has no first half."""
    (first, second), (whole, _) = (
        traces_of_four.of(in_strategy(f"native/nothing+pipeline2+{schedule}", 2))
        for schedule in ("zerobubble", "interleaved")
    )
    kept = [[p.kept_at(way, 2) for way in ("backward", "weights")] for p in (*first.rank.stages, second.rank.stages[1])]
    assert kept == [[22912, 22912], [21824, 33088], [24072, 37380]]
    assert whole.rank.stages[1].kept_at("backward", 2) == 21824
    trained = {number for number, p in enumerate(second.timeline.parameters) if p.trained}
    assert set(second.timeline.gradient_order) == trained


def test_steps_with_two_stages_on_a_rank(traces_of_four: TaskTraces) -> None:
    """FSDP2 gathers the rest for each stage; gradients of zerobubble, which has none of it, are averaged one by one."""
    block = (3 * 16 * 16 + 16 * 16 + 2 * 64 * 16 + 64 + (4 * 16 + 16)) * 4
    rest = TIED + 8 * 16 * 4
    interleaved = step_of(traces_of_four, "native/parameters+pipeline2+interleaved", 4)
    assert interleaved.sent == (
        CommVolume("pipeline", "all_reduce", TIED // 2, 1, 2),
        CommVolume("all ranks", "all_reduce", 8, 1, 4),
        CommVolume("all ranks", "all_reduce", 4, 1, 4),
        CommVolume("data", "all_gather", 2 * 2 * 2 * (block + rest), 2 * 2 * 2 * 2, 2),
        CommVolume("data", "reduce_scatter", 2 * (2 * block + rest), 2 * 3, 2),
        CommVolume("pipeline", "send", 2 * (2 * STATE + 2 * 3 * HIDDEN), 2 * 5, 2),
    )
    assert interleaved.phases[-1].held["parameters"] == (2 * block + rest) // 2
    halves = step_of(traces_of_four, "native/nothing+pipeline2+zerobubble", 4)
    whole = 2 * block + TIED + 2 * 16 * 4
    assert halves.sent[3] == CommVolume("data", "all_reduce", whole, 23, 2)
    buffers = next(term for term in halves.phases[-1].terms if term.name == "buffers for what other stages send")
    assert buffers.size == 2 * 2 * 3 * HIDDEN


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16-mixed", marks=pytest.mark.sweep)])
def test_activations_of_the_proof(given: dict[str, Any], precision: str) -> None:
    """Rank 0 runs a microbatch of the whole model in fp32: what one process holds in a step, but for the optimizer."""
    sizes = BatchSizes(total=64, micro=64, accumulate=1, ranks=1)
    traces = TaskTraces(load_given_config(given | {"train": {"steps": 1, "precision": precision}}).config, 2)
    alone = predicted(TaskTraces(load_given_config(given).config, 2), in_strategy("single", 1), 1, sizes)
    for strategy in ("native/nothing+tensor2", "deepspeed/nothing+tensor2"):
        config = in_strategy(strategy, 2).changed({"train.precision": precision})
        (first, *_) = predicted(traces, config, 2, sizes).phases
        assert first.peak == alone.step_peak.peak - alone.step_peak.held["optimizer"]
        assert traces.predict_needed(PredictionRequest(config, 2, sizes, "cpu")) >= first.peak


def test_parts_of_accelerate(traces: TaskTraces) -> None:
    """They are native's; FSDP2's mesh is Accelerate's, whose root stays gathered, and options.native say nothing."""
    split = {"options": {"native": {"vocabulary": "split", "proof": "off"}}}
    config = in_strategy("accelerate/parameters+tensor2", 4).changed(split)
    (traced,) = traces.of(config)
    (native,) = traces.of(in_strategy("native/parameters+tensor2", 4))
    assert (traced.timeline.parameters, sent(traced)) == (native.timeline.parameters, sent(native))
    step = predicted(traces, config, 4, config.batch.settle(2))
    blocks = 3 * (3 * 16 * 16 + 16 * 16 + 2 * 64 * 16 + 64 + 2 * (4 * 16 + 16)) // 2 * 4
    rest = TIED + (8 * 16 + 2 * 16) * 4
    assert step.sent == (
        CommVolume("all ranks", "all_reduce", 8, 1, 4),
        CommVolume("data", "all_gather", 2 * (2 * blocks + rest), 2 * (2 * 3 + 1), 2),
        CommVolume("data", "reduce_scatter", 2 * (blocks + rest), 2 * (3 + 1), 2),
        CommVolume("tensor", "all_reduce", 2 * 2 * 3 * 4 * HIDDEN, 2 * 3 * 4, 2),
    )
    assert [term.size for term in step.phases[0].terms][:2] == [sum(p.size for p in traced.timeline.whole)] * 2
    later = replace(traced.timeline, microbatches=2)
    terms = registry.find_backend("accelerate").predict(config, later, 4, device="cpu").terms
    (reduced,) = [term for term in terms if term.name == "layers.1 reduced"]
    assert reduced.until == later.at("backward", "leave", 1)  # FSDP2's mesh has one dimension here


PART = (3 * (3 * 16 * 16 + 16 * 16 + 2 * 64 * 16 + 64 + 2 * (4 * 16 + 16)) // 2 + 96 * 16 + 8 * 16 + 2 * 16) * 4
"""Bytes of a rank's part of the model, of two."""


@pytest.mark.parametrize(
    ("shard", "over_data", "norm"),
    [
        ("nothing", {"all_reduce": PART}, CommVolume("all ranks", "all_reduce", 8, 1, 4)),
        ("optimizer", {"all_reduce": PART + 4, "all_gather": PART}, CommVolume("tensor", "all_reduce", 4, 1, 2)),
        ("gradients", {"all_reduce": 2 * PART + 4, "all_gather": PART}, CommVolume("tensor", "all_reduce", 4, 1, 2)),
        (
            "parameters",
            {"all_gather": PART, "reduce_scatter": 2 * PART, "all_reduce": 8},
            CommVolume("tensor", "all_reduce", 8, 1, 2),
        ),
    ],
)
def test_parts_of_deepspeed(traces: TaskTraces, shard: str, over_data: dict[str, int], norm: CommVolume) -> None:
    """ZeRO works over the data on a rank's parts; ranks of tensor add up the norm, and rank 0 proves the split."""
    step = step_of(traces, f"deepspeed/{shard}+tensor2", 4)
    assert {p.collective: p.size for p in step.sent if p.axis == "data"} == over_data
    assert {p.ranks for p in step.sent if p.axis == "data"} == {2}
    assert step.sent[-2:] == (norm, CommVolume("tensor", "all_reduce", 2 * 2 * 3 * 4 * HIDDEN, 2 * 3 * 4, 2))
    (first, *_) = step.phases
    assert (first.phase, first.terms[0].name) == ("built", "whole model, of rank 0")


def test_matrices_that_deepspeed_does_not_cut(given: dict[str, Any]) -> None:
    """They stay whole in the plan as in training; native cuts them."""
    traces = TaskTraces(load_given_config(given).config, 2, Encoded(layers=1, width=16, heads=2, context=8))
    for backend, rows in {"deepspeed": 48, "native": 24}.items():
        (traced,) = traces.of(in_strategy(f"{backend}/nothing+tensor2", 2))
        shapes = {p.name: p.shape for p in traced.timeline.parameters}
        assert shapes["1.self_attn.in_proj_weight"] == (rows, 16)
        assert shapes["1.linear1.weight"] == (16, 16)


def test_what_is_refused(traces: TaskTraces) -> None:
    """A process that trains, and fewer blocks than stages."""
    sentence = (
        "parallel.pipeline: 4 stages (2 on each of 2 ranks, by interleaved) need a block each, and the model has 3 "
        "(layers.0, layers.1, layers.2): lower pipeline, take schedule 1f1b, or name smaller blocks in model.blocks"
    )
    with pytest.raises(TaskError, match=re.escape(sentence)):
        traces.of(in_strategy("native/nothing+pipeline2+interleaved", 2))
    sentence = (
        "plan: a model that is split over tensor, pipeline or context is planned in groups without peers, and this "
        "process is in a process group already: plan in another process, or before training starts"
    )
    with fake_groups(Mesh.of(0, 2, tensor=2)), pytest.raises(TaskError, match=re.escape(sentence)):
        traces.of(in_strategy("native/nothing+tensor2", 2).changed({"options": {"native": {"proof": "off"}}}))


def test_other_strategies_are_planned(given: dict[str, Any]) -> None:
    """A world that the axes do not divide is told in its row."""
    rows = unipar.plan(given, strategies=["native/nothing+tensor2"], worlds=[2, 3]).rows
    assert [(row.ranks, row.micro, row.refusal) for row in rows] == [
        (2, 2, ""),
        (3, 0, "native/nothing+tensor2 needs a multiple of 2 ranks (tensor 2), and there are 3"),
    ]


def test_the_proof_before_the_first_step(traces: TaskTraces, given: dict[str, Any]) -> None:
    """Rank 0 runs the whole model, and each rank its part, without autocast: under bf16-mixed the set-up needs as much
    as in fp32."""
    config, sizes = in_strategy("native/nothing+tensor2", 2), BatchSizes(total=8, micro=8, accumulate=1, ranks=1)
    mixed = config.changed({"train.precision": "bf16-mixed"})
    whole = predicted(traces, config, 2, sizes).phases[0]
    halved = TaskTraces(load_given_config(given).config.changed({"train.precision": "bf16-mixed"}), 2)
    built, forward, *_ = predicted(halved, mixed, 2, sizes).phases
    assert (built.phase, built.peak, built.held) == (whole.phase, whole.peak, whole.held)
    assert built.peak > forward.peak
    unproved = config.changed({"options": {"native": {"proof": "off"}}})
    assert predicted(traces, unproved, 2, sizes).phases[0].held == {
        "temporaries": 45376,
        "parameters": 26560,
    }
