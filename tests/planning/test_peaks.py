"""Peaks of a step, from what a model allocates and from the terms of each backend, on a step written by hand."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from unipar.backend import offered_strategies as strategies
from unipar.backend import registry
from unipar.config import Strategy
from unipar.config.config_source import load_given_config
from unipar.errors import Unsupported
from unipar.planning.activations import Activations, AllocatedBlock
from unipar.planning.cpu_copies import late_bytes, needed_with_gloo
from unipar.planning.peaks import PlannedMemory
from unipar.prediction.timeline import CommVolume, Moment, PredictedParameter, Prediction, StepTimeline, Term

MOMENTS = (
    *((0, Moment("forward", "begin")), (1, Moment("forward", "reach", 0)), (2, Moment("forward", "enter", 0))),
    *((5, Moment("forward", "finish", 0)), (6, Moment("forward", "leave", 0))),
    *((7, Moment("forward", "reach", 1)), (8, Moment("forward", "enter", 1))),
    *((9, Moment("forward", "finish", 1)), (10, Moment("forward", "leave", 1))),
    *((11, Moment("backward", "begin")), (12, Moment("backward", "reach", 1)), (13, Moment("backward", "enter", 1))),
    *((15, Moment("backward", "gradient", 1, 1)), (16, Moment("backward", "finish", 1))),
    *((17, Moment("backward", "leave", 1)), (18, Moment("backward", "reach", 0)), (19, Moment("backward", "enter", 0))),
    *((21, Moment("backward", "gradient", 0, 0)), (22, Moment("backward", "finish", 0))),
    *((23, Moment("backward", "leave", 0)), (24, Moment("backward", "finish")), (25, Moment("update", "begin"))),
    (26, Moment("steady", "begin")),
)
"""Two blocks with a matrix each; the ticks between them are allocations, in ALLOCATED."""

ALLOCATED = Activations(
    (
        AllocatedBlock(0.0, 100.0, "mm", "a", 3, 20),  # freed in backward: an activation
        AllocatedBlock(0.0, 30.0, "gelu", "a", 4, 8),  # freed in forward
        AllocatedBlock(40.0, 10.0, "mm", "", 14, 14),
        AllocatedBlock(40.0, 0.0, "mm", "", 20, None),
    ),
    MOMENTS,
    (0.0, 0.0),
    (0.0, 0.0),
)

TIMELINE = StepTimeline(
    (PredictedParameter("a", (3, 4), 4, True, 0, (4, 4)), PredictedParameter("b", (3, 4), 4, True, 1, (4, 4))),
    {"mask": 7},
    ("first", "second"),
    tuple(moment for _, moment in MOMENTS),
)
"""48 bytes in each of two parameters, and twice as much for the optimizer."""


def peaks(strategy: str, ranks: int, device: str = "cpu", **train: object) -> dict[str, tuple[int, dict[str, int]]]:
    """Return the peak of each phase, and its bytes by category, of a strategy on so many ranks."""
    given = {"batch": {"total": 8}, "train": {"steps": 1, **train}, "parallel": {"data": ranks}}
    config = strategies.config_in_strategy(load_given_config(given).config, Strategy.parse(strategy))
    prediction = registry.find_backend(config.backend).predict(config, TIMELINE, ranks, device=device)
    found = PlannedMemory(TIMELINE, prediction, ALLOCATED, 2).peaks()
    return {peak.phase: (peak.peak, {name: size for name, size in peak.held.items() if size}) for peak in found}


def test_one_process() -> None:
    """Gradients come in backward, one by one, and go when the update is over."""
    held = {"buffers": 7, "parameters": 96, "optimizer": 192}
    assert peaks("single", 1) == {
        "forward": (555, {**held, "activations": 200, "temporaries": 60}),
        "backward": (583, {**held, "activations": 240, "gradients": 48}),  # the last gradient is being computed
        "update": (431, {**held, "activations": 40, "gradients": 96}),
        "steady": (335, {**held, "activations": 40}),
    }


@pytest.mark.parametrize(
    ("strategy", "ranks", "forward", "backward"),
    [
        ("native/nothing", 2, {"gradients": 96}, {"gradients": 96}),
        ("accelerate/nothing", 2, {"gradients": 96}, {"gradients": 96}),
        ("native/optimizer", 2, {"gradients": 96, "optimizer": 96}, {"gradients": 96, "optimizer": 96}),
    ],
)
def test_gradients_in_buckets(strategy: str, ranks: int, forward: dict[str, int], backward: dict[str, int]) -> None:
    """They are views of what stays; each is computed beside it."""
    held = {"buffers": 7, "parameters": 96, "optimizer": 192, "activations": 200, "temporaries": 60}
    found = peaks(strategy, ranks)
    assert found["forward"][1] == held | forward
    assert found["backward"][1] == held | backward


@pytest.mark.parametrize(
    ("strategy", "ranks", "wanted"),
    [
        ("horovod/nothing", 1, []),
        ("horovod/nothing", 2, [Term("communication", "Horovod's fusion buffer", 2**20, 0)]),
        ("deepspeed/nothing", 1, [Term("communication", "gradients, flat", 96, 20, 21)]),
        ("deepspeed/nothing", 2, [Term("communication", "gradients, flat", 96, 20, 21)]),
    ],
)
def test_what_is_sent_is_copied(strategy: str, ranks: int, wanted: list[Term]) -> None:
    """Horovod has a buffer, of whole MiB; ZeRO 0 sums all gradients up when its backward is over."""
    given = {"batch": {"total": 8}, "train": {"steps": 1}, "parallel": {"data": ranks}}
    config = strategies.config_in_strategy(load_given_config(given).config, Strategy.parse(strategy))
    terms = registry.find_backend(config.backend).predict(config, TIMELINE, ranks, device="cpu").terms
    assert [term for term in terms if term.category == "communication"] == wanted
    assert peaks("single", 1)["steady"][1]["parameters"] == sum(t.size for t in terms if t.category == "parameters")


@pytest.mark.parametrize("strategy", ["native/parameters", "accelerate/parameters"])
@pytest.mark.parametrize(
    ("device", "forward", "backward"),
    [("cpu", 64 + 64 + 64, 64 + 64 + 64), ("cuda", 64 + 64 + 64, 64 + 64 + 64)],
)
def test_sharded_parameters(strategy: str, device: str, forward: int, backward: int) -> None:
    """A rank has 2 of 3 rows, padded to 4; the collectives of gloo have a copy of what they send.

    Forward: the first block's gathered output is still there, beside the second's and a copy of it.
    Backward: what is reduced of the second block, the first's gathered output and what it is copied to.
    """
    found = peaks(strategy, 2, device)
    assert {name: found["forward"][1].get(name, 0) for name in ("parameters", "optimizer", "communication")} == {
        "parameters": 64,
        "optimizer": 128,
        "communication": forward,
    }
    assert found["backward"][1]["communication"] == backward
    assert found["update"][1]["gradients"] == 64
    assert found["steady"][1] == {"buffers": 7, "parameters": 64, "optimizer": 128, "activations": 40}


def test_parameters_that_stay_gathered() -> None:
    """Between forward and backward, if gradients alone are split."""
    held = peaks("native/gradients", 2)["forward"][1]
    assert held["communication"] == 64 + 64 + 64 + 64  # first gathered, its output, second's output and its copy


def test_terms_of_a_peak() -> None:
    """The largest first, each with its name; equal instants belong to the span that begins there."""
    extra = Prediction((Term("library", "late", 1000, first=len(MOMENTS) - 1),))
    found = {peak.phase: peak for peak in PlannedMemory(TIMELINE, extra, ALLOCATED, 2).peaks()}
    assert [(t.name, t.size) for t in found["steady"].terms] == [("late", 1000), ("mm", 40)]
    assert [(t.category, t.name, t.size) for t in found["forward"].terms] == [
        ("activations", "mm in a", 200),
        ("temporaries", "gelu in a", 60),
    ]


def test_what_has_no_closed_form() -> None:
    """A plan of it is refused, with the way to learn it."""
    sentence = "native/nothing: options.native.wrapper: dp is not planned yet; `unipar compare` measures it"
    with pytest.raises(Unsupported, match=re.escape(sentence)):
        peaks("native/nothing+dp", 2)


def test_several_microbatches() -> None:
    """Gradients are there from the first one on; all batches of the step are held."""
    config = strategies.config_in_strategy(
        load_given_config({"batch": {"total": 8}, "train": {"steps": 1}, "parallel": {"data": 2}}).config,
        Strategy.parse("native/parameters"),
    )
    later = replace(TIMELINE, microbatches=2)
    prediction = registry.find_backend("native").predict(config, later, 2, device="cpu")
    found = PlannedMemory(later, prediction, replace(ALLOCATED, batch=(1.0, 3.0)), 2, accumulate=4).peaks()
    held = {peak.phase: peak.held for peak in found}
    assert held["forward"]["gradients"] == 64
    assert held["steady"]["activations"] == 40 + 4 * (1 + 3 * 2)
    assert "gradients" not in held["steady"]


def test_a_block_without_a_backward() -> None:
    """Its input takes no gradient: what it holds until its backward ends is there until all of it has ended."""
    nothing = Moment("backward", "gradient", -1, 9)
    without = tuple(
        (n, nothing if (m.phase, m.block) == ("backward", 0) and m.parameter < 0 else m) for n, m in MOMENTS
    )
    timeline = replace(TIMELINE, moments=tuple(m for _, m in without))
    assert timeline.at("backward", "finish", 0) == timeline.at("backward", "finish")
    config = strategies.config_in_strategy(
        load_given_config({"batch": {"total": 8}, "train": {"steps": 1}, "parallel": {"data": 2}}).config,
        Strategy.parse("native/gradients"),
    )
    prediction = registry.find_backend("native").predict(config, timeline, 2, device="cuda")
    memory = PlannedMemory(timeline, prediction, replace(ALLOCATED, moments=without), 2)
    held = {peak.phase: peak.held for peak in memory.peaks()}
    assert held["backward"]["communication"] == 64 + 64  # parameters of both blocks, or of one beside a reduction
    assert held["update"]["gradients"] == 64


def test_a_parameter_without_dimensions_is_refused() -> None:
    """As the run refuses it."""
    scalar = replace(TIMELINE, parameters=(*TIMELINE.parameters, PredictedParameter("scale", (), 4, True)))
    given = {"batch": {"total": 8}, "train": {"steps": 1}, "parallel": {"data": 2, "shard": "parameters"}}
    with pytest.raises(Unsupported, match="FSDP2 does not take parameters without dimensions, and scale has none"):
        registry.find_backend("native").predict(load_given_config(given).config, scalar, 2, device="cpu")


def test_what_gloo_frees_late() -> None:
    """A copy may be there for some moments after its end, also in the next step, and a sum has scratch memory."""
    update = TIMELINE.at("update")
    early = Term("communication", "gathered", 1_000, 0, 1)
    at_end = Term("communication", "flat", 10, update, update + 1)
    sent = (CommVolume("data", "all_reduce", 96, 1, 4),)
    steps = [PlannedMemory(TIMELINE, Prediction(terms, sent), ALLOCATED, 2) for terms in ((), (early,), (at_end,))]
    needed = [needed_with_gloo(step) - steps[0].highest() for step in steps]
    assert needed == [24, 1_024, 24 + 10]
    assert late_bytes(Prediction((early, at_end), sent), ALLOCATED, 2) == 1_024
