"""Seconds of a step on a machine: each part by its formula, with numbers that a reader can check."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from unipar.backend import offered_strategies as strategies
from unipar.backend import registry
from unipar.config import Strategy
from unipar.config.config_source import load_given_config
from unipar.config.sections.strategy import Axes
from unipar.planning.machines.machine import Link, Machine, PeakRates
from unipar.planning.speed import StepSpeed, StepWork, bytes_on_the_way, describe_speed, predict_speed, seconds_of
from unipar.prediction.timeline import CommVolume

MACHINE = Machine(
    flops=PeakRates(fp32=1e12, bf16=4e12),
    reached=0.5,
    operation=0.001,
    bandwidth=1e9,
    memory=8e9,
    ranks=4,
    within=Link(latency=0.01, bandwidth=1e8, shares={"reduce_scatter": 0.5}),
    across=Link(latency=0.1, bandwidth=4e7),
)
WORK = StepWork(flops=3e12, model_flops=2e12, operations=100, update_bytes=5e8, units=64.0, microbatches=2)
SENT = (CommVolume("data", "all_reduce", 10**8, 5, 4),)


def speed(sent: tuple[CommVolume, ...] = SENT, precision: Any = "fp32", ranks: int = 4, **more: Any) -> StepSpeed:
    machine = MACHINE.model_copy(update=more.pop("machine", {}))
    overlaps, axes = more.pop("overlaps", {}), more.pop("axes", Axes())
    found = predict_speed(machine, precision, replace(WORK, **more), sent, overlaps, axes, ranks)
    assert found is not None
    return found


def test_parts_of_a_step() -> None:
    """3e12 operations at half of 1e12 a second; four ranks send 1.5 times 1e8 bytes over a ring of 1e8 a second."""
    found = speed()
    assert (found.compute, found.update, found.hidden, found.waiting) == (6.0, 0.5, 0.0, 0.0)
    assert found.communication == pytest.approx(5 * 0.01 * 2 + 1.5)
    assert found.seconds == pytest.approx(8.1)
    assert found.rate == pytest.approx(64 / 8.1)
    assert found.mfu == pytest.approx(2e12 / (1e12 * 8.1))  # without what is computed again
    assert describe_speed(found) == "computing 74%, communication that is not hidden 20%, update 6%"


def test_another_precision() -> None:
    """Each precision has a peak of its own; without one nothing is told."""
    assert speed(precision="bf16-mixed").compute == 1.5
    assert speed(precision="bf16-mixed", machine={"reached": {"fp32": 0.5, "bf16": 0.25}}).compute == 3.0
    assert speed(precision="bf16-mixed", machine={"reached": {"fp32": 0.125, "fp64": 0.75}}).compute == 6.0
    assert predict_speed(MACHINE, "fp64", WORK, SENT, {}, Axes(), 4) is None


def test_many_small_operations() -> None:
    """A GPU computes while the next ones are started; on the CPU they add up."""
    assert speed(operations=10_000).compute == 10.0
    assert speed(machine={"device": "cpu"}).compute == pytest.approx(6.1)


@pytest.mark.parametrize(("window", "hidden"), [("last backward", 1.6), ("backward", 1.6), ("step", 1.6)])
def test_communication_beside_computing(window: str, hidden: float) -> None:
    """All of it is hidden if there is enough to compute: of two backwards of 2 s each, one is the last."""
    assert speed(overlaps={"all_reduce": window}).hidden == pytest.approx(hidden)


@pytest.mark.parametrize(("window", "hidden"), [("last backward", 2.0), ("backward", 4.0), ("step", 6.0)])
def test_more_communication_than_computing(window: str, hidden: float) -> None:
    """No more is hidden than what is computed in that time, and only the share that the machine can."""
    much = (CommVolume("data", "all_reduce", 10**9, 1, 4),)
    assert speed(much, overlaps={"all_reduce": window}).hidden == pytest.approx(hidden)
    assert speed(much, overlaps={"all_reduce": window}, machine={"hides": 0.25}).hidden == pytest.approx(hidden / 4)
    other = (CommVolume("tensor", "all_reduce", 10**9, 1, 4),)
    assert speed(other, overlaps={"all_reduce": window}, axes=Axes(tensor=4)).hidden == 0.0


@pytest.mark.parametrize(
    ("collective", "ranks", "factor"),
    [
        ("all_reduce", 2, 1.0),
        ("all_reduce", 8, 1.75),
        ("all_gather", 4, 0.75),
        ("reduce_scatter", 4, 0.75),
        ("broadcast", 4, 1.0),
        ("send", 2, 1.0),
        ("all_reduce", 1, 0.0),
    ],
)
def test_bytes_on_the_way(collective: str, ranks: int, factor: float) -> None:
    """Of a ring: to reduce takes as many steps as to gather."""
    assert bytes_on_the_way(collective, ranks) == factor


def test_slower_ways() -> None:
    """A collective that reaches less, and a group that crosses machines: two of four ranks share 4e7 bytes a second."""
    scattered = CommVolume("data", "reduce_scatter", 10**8, 1, 4)
    assert seconds_of(scattered, MACHINE, Axes(), 4) == pytest.approx(0.02 + 0.75 / 0.5)
    gathered = CommVolume("data", "all_gather", 10**8, 1, 4)
    assert seconds_of(gathered, MACHINE, Axes(tensor=2), 8) == pytest.approx(0.2 + 0.75e8 / 2e7)


def test_a_pipeline_waits() -> None:
    """Three of five turns of its bubble: 1f1b with four stages and two microbatches."""
    found = speed((), axes=Axes(pipeline=4))
    assert found.waiting == pytest.approx(6.0 * 3 / 2)
    assert found.seconds == pytest.approx(6.0 + 9.0 + 0.5)


@pytest.mark.parametrize(
    ("strategy", "more", "overlaps"),
    [
        ("single", {}, {}),
        ("native/nothing", {}, {"all_reduce": "last backward"}),
        ("native/nothing+dp", {}, {}),
        ("native/parameters", {}, {"all_gather": "step", "reduce_scatter": "step"}),
        ("accelerate/gradients", {}, {"all_gather": "step", "reduce_scatter": "step"}),
        ("horovod/nothing", {}, {"all_reduce": "last backward"}),
        ("deepspeed/nothing", {}, {}),
        ("deepspeed/gradients", {}, {}),
        ("deepspeed/gradients", {"overlap": True},
         {"all_reduce": "backward", "reduce_scatter": "backward", "reduce": "backward"}),
        ("deepspeed/parameters", {}, {"all_gather": "step", "reduce_scatter": "step", "all_reduce": "step"}),
        ("deepspeed/parameters", {"overlap": False}, {}),
    ],
)  # fmt: skip
def test_what_each_library_hides(strategy: str, more: dict[str, Any], overlaps: dict[str, str]) -> None:
    """As its engine is set up."""
    given = {"batch": {"total": 8}, "train": {"steps": 1}, "parallel": {"data": 2}, "options": {"deepspeed": more}}
    config = strategies.config_in_strategy(load_given_config(given).config, Strategy.parse(strategy))
    assert registry.find_backend(config.backend).overlaps(config) == overlaps
