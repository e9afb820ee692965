"""Closed forms of ZeRO: by hand, by the paper, and beside DeepSpeed's own engine at any number of ranks."""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.two_modules import MOMENTS, TIMELINE
from tests.support.world import ROOT
from tests.support.zero_library import Case
from unipar.backend import offered_strategies as strategies
from unipar.backend import registry
from unipar.config import Strategy
from unipar.config.config_source import load_given_config
from unipar.launcher.processes.group import WorkerGroup
from unipar.prediction.timeline import (
    CommVolume,
    Moment,
    PredictedModule,
    PredictedParameter,
    Prediction,
    StepTimeline,
)


def predict(
    strategy: str,
    ranks: int,
    timeline: StepTimeline = TIMELINE,
    device: str = "cpu",
    precision: str = "fp32",
    **more: Any,
) -> Prediction:
    given = {"batch": {"total": 1024}, "train": {"steps": 1, "precision": precision}, "parallel": {"data": ranks}}
    config = strategies.config_in_strategy(load_given_config(given | more).config, Strategy.parse(strategy))
    return registry.find_backend(config.backend).predict(config, timeline, ranks, device=device)


def held(prediction: Prediction, at: int, *left_out: str) -> dict[str, int]:
    """Return the bytes that are held at a moment, by category."""
    sums: Counter[str] = Counter()
    for term in prediction.terms:
        if term.first <= at and (term.until is None or term.until > at) and term.category not in left_out:
            sums[term.category] += term.size
    return {category: size for category, size in sums.items() if size}


@pytest.mark.parametrize(
    ("shard", "precision", "ranks", "wanted"),
    [
        ("nothing", "fp32", 2, 0.0),
        ("optimizer", "fp32", 4, 8.0),
        ("gradients", "bf16-mixed", 2, 8.0),
        ("parameters", "fp32", 2, 0.0),
        ("nothing", "bf16-master", 4, 24.0),
        ("optimizer", "bf16-master", 2, 10.0),
        ("gradients", "bf16-master", 4, 8.0),
        ("parameters", "bf16-master", 2, 9.0),
        ("parameters", "bf16-master", 4, 6.5),
    ],
)
def test_bytes_a_parameter_before_the_first_step(shard: str, precision: str, ranks: int, wanted: float) -> None:
    """As measured on rank 0 of 2 and 4 on the CPU; on a GPU most of it is in the host's memory, and not told."""
    built = predict(f"deepspeed/{shard}", ranks, precision=precision).built
    assert sum(term.size for term in built) / 200_001 == pytest.approx(wanted, rel=1e-4)
    assert predict(f"deepspeed/{shard}", ranks, device="cuda", precision=precision).built == ()


@pytest.mark.parametrize(
    ("strategy", "wanted"),
    [
        ("deepspeed/nothing", {"parameters": 800_004, "optimizer": 1_600_008}),
        ("deepspeed/optimizer", {"parameters": 800_016, "masters": 400_008, "optimizer": 800_016}),
        ("deepspeed/gradients", {"parameters": 800_016, "masters": 400_008, "optimizer": 800_016}),
        (
            "deepspeed/parameters",
            {
                "parameters": 400_004,
                "masters": 400_004,
                "optimizer": 800_008,
                "gradients": 400_004,
                "communication": 262_144,
            },
        ),
    ],
)
def test_between_two_steps(strategy: str, wanted: dict[str, int]) -> None:
    """Partitions are padded: to a multiple of two elements a rank, in stage 3 each parameter to one of the ranks."""
    assert held(predict(strategy, 2), MOMENTS.index(Moment("steady", "begin"))) == wanted


@pytest.mark.parametrize(
    ("strategy", "at", "wanted"),
    [
        ("deepspeed/optimizer", 7, {"gradients": 200_000, "communication": 262_144}),
        ("deepspeed/optimizer", 11, {"gradients": 800_004, "communication": 262_144}),
        ("deepspeed/optimizer", 12, {"gradients": 2 * 800_004, "communication": 262_144}),
        ("deepspeed/gradients", 7, {"gradients": 200_000, "communication": 262_144}),
        ("deepspeed/gradients", 10, {"gradients": 600_004 + 200_000, "communication": 262_144}),
        ("deepspeed/gradients", 11, {"gradients": 600_004 + 800_004, "communication": 262_144}),
    ],
)
def test_gradients_of_flat_groups(strategy: str, at: int, wanted: dict[str, int]) -> None:
    """Stage 1 reduces at the end, stage 2 as they come; what does not fit into a bucket stays where it is."""
    assert held(predict(strategy, 2, device="cuda"), at, "parameters", "masters", "optimizer") == wanted


def test_stage_3_gathers_and_keeps_what_autograd_keeps() -> None:
    """The first module's weight stays to its gradient, and is gathered again; gloo copies what it gathers."""
    on_gpu, on_cpu = (predict("deepspeed/parameters", 2, device=device) for device in ("cuda", "cpu"))
    bucket, first, last = 262_144, 600_008, 200_000
    sums = [held(on_gpu, at)["communication"] for at in range(len(MOMENTS))]
    call_of_last, gradient_of_last, arrival_at_first, gradient_of_first, update = 3, 7, 9, 10, 13
    assert sums[:call_of_last] == [bucket + first] * 3  # gathered ahead when the model is called
    assert sums[call_of_last:gradient_of_last] == [bucket + 2 * first + last] * 4
    assert sums[arrival_at_first] == bucket + 2 * first
    assert sums[gradient_of_first] == bucket + first
    assert sums[update] == bucket
    assert held(on_cpu, call_of_last)["communication"] == sums[call_of_last] + first + last


@pytest.mark.parametrize(
    ("strategy", "precision", "wanted"),
    [
        ("deepspeed/nothing", "fp32", [CommVolume("data", "all_reduce", 800_004, 1, 2)]),
        (
            "deepspeed/optimizer",
            "bf16-master",
            [CommVolume("data", "all_reduce", 400_002 + 1 + 4, 5, 2), CommVolume("data", "all_gather", 400_008, 1, 2)],
        ),
        (
            "deepspeed/gradients",
            "fp32",
            [CommVolume("data", "all_reduce", 800_004 + 4, 4, 2), CommVolume("data", "all_gather", 800_016, 1, 2)],
        ),
        (
            "deepspeed/parameters",
            "fp32",
            [
                CommVolume("data", "all_gather", 2 * 600_008 + 200_000, 3, 2),
                CommVolume("data", "reduce_scatter", 800_008, 2, 2),
                CommVolume("data", "all_reduce", 8, 1, 2),
            ],
        ),
    ],
)
def test_what_is_sent(strategy: str, precision: str, wanted: list[CommVolume]) -> None:
    """Gradients, the norm and, in bf16, whether one overflowed; parameters after the update, in stage 3 before use."""
    assert list(predict(strategy, 2, precision=precision).sent) == wanted


@pytest.mark.parametrize(
    ("shard", "weights", "gathered"),
    [
        ("nothing", {"a": 600_004, "b": 200_000, "frozen": 160_000}, (0, 0)),
        ("gradients", {"group 0, flat": 800_016, "frozen": 160_000}, (800_016, 1)),
        # a and the frozen ones are gathered by themselves, in forward and in backward; b once
        ("parameters", {"a": 300_004, "b": 100_000, "frozen": 80_000}, (2 * (600_008 + 160_000) + 200_000, 5)),
    ],
)
def test_frozen_weights_in_bf16(shard: str, weights: dict[str, int], gathered: tuple[int, int]) -> None:
    """They stay narrow beside what is trained in fp32, and stage 3 gathers each dtype by itself."""
    frozen = PredictedParameter("frozen", (80_000,), 2, trained=False)
    modules = (PredictedModule("first", (0, 2)), TIMELINE.modules[1])
    timeline = replace(TIMELINE, parameters=(*TIMELINE.parameters, frozen), modules=modules)
    prediction = predict(f"deepspeed/{shard}", 2, timeline)
    assert {term.name: term.size for term in prediction.terms if term.category == "parameters"} == weights
    sent = [(each.size, each.calls) for each in prediction.sent if each.collective == "all_gather"]
    assert sent == [gathered] * (gathered[0] > 0)


@pytest.mark.parametrize(
    ("shard", "gigabytes"), [("nothing", 120.0), ("optimizer", 31.4), ("gradients", 16.6), ("parameters", 1.9)]
)
def test_the_rows_of_the_paper(shard: str, gigabytes: float) -> None:
    """ZeRO's table: 7.5 billion parameters, Adam, mixed precision, 64 ranks: states when the backward ends."""
    count = 3_000
    parameters = tuple(PredictedParameter(f"p{n}", (2_500_000,), 4, True, states=(4, 4)) for n in range(count))
    gradients = [Moment("backward", "gradient", parameter=n) for n in reversed(range(count))]
    moments = (Moment("forward", "begin"), Moment("backward", "begin"), *gradients)
    moments += (Moment("backward", "finish"), Moment("update", "begin"), Moment("steady", "begin"))
    timeline = StepTimeline(parameters, {}, (), moments)
    prediction = predict(f"deepspeed/{shard}", 64, timeline, "cuda", "bf16-master")
    at = len(moments) - (4 if shard in ("nothing", "optimizer") else 2)  # stages 2 and 3 have reduced the last ones
    states = held(prediction, at, "communication", "temporaries")
    assert round(sum(states.values()) / 1e9, 1) == gigabytes


def compare(cases: list[Case], folder: Path) -> list[dict[str, Any]]:
    """Return what is planned for each case, and what DeepSpeed did."""
    (folder / "cases.json").write_text(json.dumps([asdict(case) for case in cases]), "utf-8")
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    with WorkerGroup(folder, 1, "tests.support.zero_library:run", environment={"PYTHONPATH": path}) as workers:
        workers.wait()
    return json.loads((folder / "compared.json").read_text("utf-8"))


OFFLOADED = {"offload_optimizer": "cpu", "cpu_adam": "torch"}
SMALL = {"reduce": 2000, "prefetch": 500, "persistence": 60, "live": 4000, "reuse": 700}


TO_DISK = {"offload_optimizer": "disk", "cpu_adam": "torch"}
LIMITS = {"smallest": 1024, "buffer": 20_000}
READ = {**LIMITS, "sub_group": 3_000, "in_memory": 0}
"""Limits with which parameters of small models are read from the disk as they are needed."""


def draw_disk_case(draw: random.Random, folder: Path) -> Case:
    """Return a case at random in which the optimizer, parameters or both are on the disk."""
    precision = draw.choice(["fp32", "bf16-master"])
    to_disk = [{"offload_parameters": "disk"}, TO_DISK, {"offload_parameters": "disk", **TO_DISK}]
    options: dict[str, Any] = {"offload_to": str(folder / str(draw.random())), "reduce": draw.choice([300, 2000, 9000])}
    options |= draw.choice(to_disk if precision == "fp32" else to_disk[:1])
    options |= {"prefetch": draw.choice([1, 500, 5000]), "persistence": draw.choice([1, 60, 500])}
    options |= {"live": draw.choice([800, 4000, 10**6]), "reuse": draw.choice([0, 0, 10**9])}
    limits = {"sub_group": draw.choice([10**9, 3_000, 700]), "in_memory": draw.choice([10**9, 3_500, 0])}
    ranks, micros, decay = draw.choice([1, 2, 3, 4, 8]), draw.choice([1, 2, 3]), draw.choice(["all", "matrices"])
    limits |= {"smallest": draw.choice([1024, 2048, 4096]), "buffer": 20_000}
    return Case(draw.randint(0, 10**6), "deepspeed/parameters", ranks, precision, micros, decay, options, limits)


def draw_case(draw: random.Random) -> Case:
    """Return a case at random: any stage, number of ranks, precision, groups, and sizes of buckets."""
    shard = draw.choice(["nothing", "optimizer", "gradients", "parameters"])
    options: dict[str, Any] = {"reduce": draw.choice([300, 2000, 9000])}
    if shard == "parameters":
        options |= {"prefetch": draw.choice([1, 500, 5000]), "persistence": draw.choice([1, 60, 500])}
        options |= {"live": draw.choice([800, 4000, 10**6]), "reuse": draw.choice([0, 700, 10**9])}
    elif draw.random() < 0.3:
        options["contiguous"] = False
    if shard != "nothing" and "contiguous" not in options and draw.random() < 0.4:
        options |= OFFLOADED
    return Case(
        draw.randint(0, 10**6),
        f"deepspeed/{shard}",
        draw.choice([1, 2, 3, 4, 8, 64, 1000]),
        draw.choice(["fp32", "bf16-master"]),
        draw.choice([1, 2, 3]),
        draw.choice(["all", "matrices"]),
        None if shard == "nothing" or draw.random() < 0.3 else options,
    )


@pytest.mark.usefixtures("forked")
def test_as_deepspeed_does(tmp_path: Path) -> None:
    """Its own engine, on one rank of a world that only pretends, holds and sends to the byte what is planned."""
    cases = [
        Case(7, "deepspeed/nothing", 1000),
        Case(7, "deepspeed/optimizer", 3),
        Case(7, "deepspeed/gradients", 64, microbatches=2, options={"reduce": 2000}),
        Case(7, "deepspeed/parameters", 8, options=SMALL),
        Case(7, "deepspeed/parameters", 3, options={**SMALL, "reuse": 0}),
        Case(7, "deepspeed/gradients", 8, "bf16-master", microbatches=2, options={"reduce": 2000, **OFFLOADED}),
        Case(7, "deepspeed/parameters", 8, options={**SMALL, **OFFLOADED}),
    ]
    for case, compared in zip(cases, compare(cases, tmp_path), strict=True):
        assert compared["planned"] == compared["found"], case


@pytest.mark.sweep
@pytest.mark.usefixtures("forked")
def test_as_deepspeed_does_with_a_disk(tmp_path: Path) -> None:
    """Memory and files are those planned; where it reads a parameter twice, and ends with an error, no plan is made."""
    parameters = {**SMALL, "offload_parameters": "disk"}
    both = parameters | TO_DISK
    cases = [
        Case(7, "deepspeed/parameters", 2, microbatches=2, options=both, limits=LIMITS),
        Case(7, "deepspeed/parameters", 3, "bf16-master", options=parameters, limits={**READ, "in_memory": 3_500}),
        Case(5, "deepspeed/parameters", 2, microbatches=2, options=both, limits=READ),
        Case(7, "deepspeed/parameters", 2, options=both | {"reuse": 0}, limits=READ),
    ]
    cases = [
        replace(case, options=(case.options or {}) | {"offload_to": str(tmp_path / str(number))})
        for number, case in enumerate(cases)
    ]
    found = compare(cases, tmp_path)
    for case, compared in zip(cases, found, strict=True):
        assert compared["planned"] == compared["found"], case
    assert ["fails" in compared["planned"] for compared in found] == [False, False, False, True]


def test_swap_buffers_have_a_name() -> None:
    """A partition that is read into one is part of it; another has memory of its own."""
    from unipar_deepspeed.zero_holdings import zero_holdings

    buffers, updated, mine = torch.zeros(8), torch.zeros(6), torch.zeros(3)
    swapper = SimpleNamespace(buffers=buffers, partitioned_swap_buffer=updated)
    model = nn.Linear(2, 2)
    for p, part in zip(model.parameters(), (buffers[:4], mine), strict=True):
        vars(p).update(nvme_swapper=swapper, ds_tensor=part)
    manager = SimpleNamespace(all_buffers=[torch.zeros(5)])
    zero = SimpleNamespace(optimizer_swapper=SimpleNamespace(swap_buffer_manager=manager))
    engine = SimpleNamespace(optimizer=zero, basic_optimizer=SimpleNamespace(state={}))
    found = [(h.category, h.name, h.tensor.numel()) for h in zero_holdings(model, engine)]
    assert [(category, name, size) for category, name, size in found if "gathered" not in name] == [
        ("communication", "swap buffer of the optimizer[0]", 5),
        ("communication", "swap buffers of parameters", 8),
        ("communication", "swap buffer for updated parameters", 6),
        ("parameters", "bias", 3),
    ]


@pytest.mark.sweep
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("seed", range(4))
def test_as_deepspeed_does_with_a_disk_at_random(seed: int, tmp_path: Path) -> None:
    """As above, with limits of what goes to the disk that are drawn, too."""
    draw = random.Random(seed)
    cases = [draw_disk_case(draw, tmp_path) for _ in range(20)]
    for case, compared in zip(cases, compare(cases, tmp_path), strict=True):
        assert compared["planned"] == compared["found"], case


@pytest.mark.sweep
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("seed", range(4))
def test_as_deepspeed_does_at_random(seed: int, tmp_path: Path) -> None:
    """Shapes, worlds, precisions, accumulation, groups and buckets are drawn from a seed."""
    draw = random.Random(seed)
    cases = [draw_case(draw) for _ in range(20)]
    for case, compared in zip(cases, compare(cases, tmp_path), strict=True):
        assert compared["planned"] == compared["found"], case
