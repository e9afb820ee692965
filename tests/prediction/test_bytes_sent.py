"""What a step sends in each strategy, on a step written by hand: `benchmarks.plan` holds the same against real runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from unipar.backend import offered_strategies as strategies
from unipar.backend import registry
from unipar.config import Strategy
from unipar.config.config_source import load_given_config
from unipar.prediction.bytes_sent import LIBRARY_BUCKETS, count_buckets
from unipar.prediction.timeline import Moment, PredictedParameter, StepTimeline

TIMELINE = StepTimeline(
    (
        PredictedParameter("a", (3, 4), 4, True, 0, (4, 4)),
        PredictedParameter("b", (3, 4), 4, True, 1, (4, 4)),
        PredictedParameter("head", (5,), 4, True, -1, (4, 4)),
    ),
    {"mask": 7},
    ("first", "second"),
    (
        *(
            Moment("update", "begin"),
            Moment("steady", "begin"),
            Moment("forward", "begin"),
            Moment("backward", "begin"),
        ),
        *(Moment("backward", what, block) for block in (1, 0) for what in ("reach", "finish")),
        *(Moment("backward", "finish"), *(Moment("backward", "gradient", -1, number) for number in range(3))),
    ),
)
"""48 bytes in each of two blocks, and 20 outside of them; FSDP2 pads them to 64 and 24 on two ranks."""


def sent(strategy: str, ranks: int, timeline: StepTimeline = TIMELINE, **more: Any) -> set[tuple[str, int, int, int]]:
    """Return collective, bytes, calls and ranks of what a strategy sends."""
    train = {"steps": 1, **more.pop("train", {})}
    parallel = {"data": ranks, **more.pop("parallel", {})}
    given = {"batch": {"total": 8}, "train": train, "parallel": parallel, **more}
    config = strategies.config_in_strategy(load_given_config(given).config, Strategy.parse(strategy))
    found = registry.find_backend(config.backend).predict(config, timeline, ranks, device="cpu").sent
    assert {volume.axis for volume in found} <= {"data"}
    return {(p.collective, p.size, p.calls, p.ranks) for p in found}


@pytest.mark.parametrize(
    "strategy",
    ["single", "native/nothing", "native/optimizer", "native/parameters", "horovod", "accelerate/parameters"],
)
def test_one_rank_sends_nothing(strategy: str) -> None:
    """There is no other."""
    assert sent(strategy, 1) == set()


@pytest.mark.parametrize(
    ("strategy", "wanted"),
    [
        ("native/nothing", {("all_reduce", 116, 1, 2)}),
        ("accelerate/nothing", {("all_reduce", 116, 1, 2)}),
        ("native/optimizer", {("all_reduce", 116, 1, 2), ("broadcast", 116, 2, 2)}),
        ("native/gradients", {("all_gather", 152, 3, 2), ("reduce_scatter", 152, 3, 2), ("all_reduce", 12, 1, 2)}),
        ("native/parameters", {("all_gather", 304, 6, 2), ("reduce_scatter", 152, 3, 2), ("all_reduce", 12, 1, 2)}),
        # Accelerate keeps what is outside of the blocks
        ("accelerate/parameters", {("all_gather", 280, 5, 2), ("reduce_scatter", 152, 3, 2), ("all_reduce", 12, 1, 2)}),
        ("horovod", {("all_reduce", 116, 1, 2)}),
    ],
)
def test_two_ranks(strategy: str, wanted: set[tuple[str, int, int, int]]) -> None:
    """Gradients once; FSDP2 gathers parameters, again in backward where they were freed, and sends their norms."""
    assert sent(strategy, 2) == wanted


@pytest.mark.parametrize(
    ("strategy", "more", "wanted"),
    [
        ("native/nothing", {}, {("all_reduce", 116, 1, 2)}),
        ("native/gradients", {}, {("all_gather", 304, 6, 2), ("reduce_scatter", 304, 6, 2), ("all_reduce", 12, 1, 2)}),
        # bf16 gathered, fp32 summed up, both once: gradients stay whole until the last microbatch
        (
            "native/optimizer",
            {"train": {"precision": "bf16-master"}},
            {("all_gather", 76, 3, 2), ("reduce_scatter", 152, 3, 2), ("all_reduce", 12, 1, 2)},
        ),
    ],
)
def test_two_microbatches(strategy: str, more: dict[str, Any], wanted: set[tuple[str, int, int, int]]) -> None:
    """DDP sums gradients up once a step, FSDP2 once a microbatch."""
    assert sent(strategy, 2, replace(TIMELINE, microbatches=2), **more) == wanted


def test_copies_of_shards() -> None:
    """Ranks that shard one copy gather and scatter among themselves; reduced shards are summed up over copies."""
    assert sent("native/gradients", 4, parallel={"shard_over": 2}) == {
        ("all_gather", 152, 3, 2),
        ("reduce_scatter", 152, 3, 2),
        ("all_reduce", 76, 3, 2),
        ("all_reduce", 12, 1, 2),
    }


def test_norm_in_fp64() -> None:
    """One number is sent in place of a norm for each parameter."""
    wanted = ("all_reduce", 8, 1, 2)
    assert wanted in sent("native/parameters", 2, train={"clip": {"max": 1.0, "norm": "fp64"}})


def test_a_parameter_without_a_gradient() -> None:
    """DDP searches for parameters that are not used, and ranks tell each other which they are."""
    unused = replace(TIMELINE, moments=TIMELINE.moments[:-1])
    assert ("all_reduce", 116 + 12, 2, 2) in sent("native/nothing", 2, unused)
    assert ("all_reduce", 116, 1, 2) in sent(
        "native/nothing", 2, unused, options={"native": {"find_unused_parameters": False}}
    )


def test_local_sgd() -> None:
    """Parameters and moments are averaged every fourth step: the mean of a step."""
    assert sent("native/nothing", 2, train={"local_steps": 4}) == {("all_reduce", 3 * 116 // 4, 3, 2)}


def test_half_of_what_horovod_sends() -> None:
    """Its compression rounds gradients to half precision; without fusion each is sent by itself."""
    options = {"horovod": {"compression": "fp16", "fusion_mb": 0}}
    assert sent("horovod", 2, options=options) == {("all_reduce", 58, 3, 2)}


def test_a_block_that_takes_no_gradient() -> None:
    """Such a block is not gathered in backward, unless it is gathered ahead for nothing: the last of such blocks."""
    frozen = replace(TIMELINE.parameters[0], trained=False), *TIMELINE.parameters[1:]
    moments = tuple(m for m in TIMELINE.moments if m.block != 0 and m.parameter != 0)
    timeline = replace(TIMELINE, parameters=frozen, moments=moments)
    wanted = {("all_gather", 304, 6, 2), ("reduce_scatter", 88, 2, 2), ("all_reduce", 8, 1, 2)}
    assert sent("native/parameters", 2, timeline) == wanted
    moments = tuple(m for m in moments if m.block != 1 and m.parameter != 1)
    timeline = replace(timeline, parameters=(frozen[0], replace(frozen[1], trained=False), frozen[2]), moments=moments)
    wanted = {("all_gather", 240, 5, 2), ("reduce_scatter", 24, 1, 2), ("all_reduce", 4, 1, 2)}
    assert sent("native/parameters", 2, timeline) == wanted


def test_a_rank_without_parameters() -> None:
    """One number more, which that rank sends as it shares what it has updated."""
    assert ("broadcast", 116 + 2 * 4, 5, 5) in sent("native/optimizer", 5, batch={"total": 10})


def test_buckets() -> None:
    """Each closes at its limit; those of another dtype are apart. Accelerate leaves DDP's own, a small one first."""
    parameters = [PredictedParameter(str(n), (2**18,), 4, True) for n in range(6)]  # a MiB each
    assert [count_buckets(parameters, [limit * 2**20]) for limit in (1, 2, 25)] == [6, 3, 1]
    assert count_buckets(parameters, LIBRARY_BUCKETS) == 2
    assert count_buckets([replace(p, element_size=4 + 4 * (n % 2)) for n, p in enumerate(parameters)], [2**23]) == 2
